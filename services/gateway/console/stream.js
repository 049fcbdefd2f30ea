// A job's events as they happen. EventSource cannot send a token, so the stream is read with fetch.

import { request } from "./api.js";
import { sleep } from "./poll.js";

const SILENCE_S = 45; // the gateway sends a comment every 15 s

/** Yields `{id, kind, data}` after an event id (or all), resuming over broken connections, until the job has ended. */
export async function* events(path, { after = null, signal }) {
  let failures = 0;
  while (!signal.aborted) {
    try {
      const response = await open(path, after, signal);
      if (response.status === 204) return;
      for await (const event of messages(response.body, signal)) {
        failures = 0;
        if (event.kind === "end") return;
        after = event.id ?? after;
        yield { ...event, data: JSON.parse(event.data) };
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && !error.passing) throw error;
    }
    await sleep(Math.min(10, 0.5 * 2 ** failures++), signal);
  }
}

const open = (path, after, signal) => request(path, { signal, headers: after ? { "Last-Event-ID": after } : {} });

/** The messages of one connection, `{id, kind, data}` with data as text; returns when it ends or has been silent for too long. */
export async function* messages(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  signal.addEventListener("abort", () => reader.cancel().catch(() => {}), { once: true });
  let text = "";
  try {
    for (;;) {
      const { value, done } = await within(reader.read());
      if (done) return;
      const parts = (text + value).replaceAll("\r\n", "\n").split("\n\n");
      text = parts.pop();
      yield* parts.map(message).filter(Boolean);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function within(read) {
  let timer;
  const silence = new Promise((resolve) => (timer = setTimeout(() => resolve({ done: true }), SILENCE_S * 1000)));
  try {
    return await Promise.race([read, silence]);
  } finally {
    clearTimeout(timer);
  }
}

function message(part) {
  const fields = {};
  for (const line of part.split("\n")) {
    const [, name, value] = /^([^:]+): ?(.*)$/.exec(line) ?? [];
    if (name) fields[name] = name === "data" && "data" in fields ? `${fields.data}\n${value}` : value;
  }
  return fields.data === undefined ? null : { id: fields.id, kind: fields.event, data: fields.data };
}
