// The gateway's public API, with the token in the header.

import { connection } from "./connection.js";
import { session } from "./session.js";

/** An answer that is not a success; `fields` are the API's `{field, message}` of each wrong field. */
export class ApiError extends Error {
  constructor(status, message, fields = []) {
    super(message);
    this.status = status;
    this.fields = fields;
  }

  /** Whether the same request may succeed a little later. */
  get passing() {
    return this.status >= 500 || this.status === 429;
  }
}

/** One request; gives the open response. A refused token ends the session. */
export async function request(path, { token = session.token, headers = {}, ...options } = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", headers: { ...headers, Authorization: `Bearer ${token}` } });
  } catch (error) {
    if (!options.signal?.aborted) connection.lost("The gateway does not answer. Trying again.");
    throw error;
  }
  if (response.status < 500) connection.found();
  if (response.ok) return response;
  const error = await described(response);
  if (error.status >= 500) connection.lost(`The gateway answers with an error: ${error.message}.`);
  if (error.status === 401 && token === session.token) session.end("The token is no longer accepted.");
  throw error;
}

/** The JSON of an answer. */
export const read = async (path, options) => (await request(path, options)).json();

/** POST without a body: an action on a job. */
export const act = (path, options) => read(path, { ...options, method: "POST" });

/** Deletes what a path names. */
export const remove = (path, options) => request(path, { ...options, method: "DELETE" });

/** A job's path; the id comes from the address line and may be anything. */
export const jobPath = (id, rest = "") => `/jobs/${encodeURIComponent(id)}${rest}`;

async function described(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, error.fields ?? []);
  } catch {
    return new ApiError(response.status, `the gateway answered ${response.status}`);
  }
}
