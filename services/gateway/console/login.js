// The login: asks for the gateway's token and tries it before it is kept.

import { read } from "./api.js";
import { h, put, say } from "./dom.js";
import { session } from "./session.js";

/** The login form. */
export function showLogin(place, signal) {
  const message = h("p", { class: "problem", id: "login-message", role: "alert" });
  const input = h("input", {
    id: "token", type: "password", required: true, autocomplete: "off", spellcheck: "false", autocapitalize: "none",
    "aria-describedby": "token-help login-message",
  });
  const button = h("button", { class: "main" }, "Sign in");
  const form = h("form", { class: "login panel", method: "post", novalidate: true },
    h("h1", { tabindex: "-1" }, "Sign in"),
    h("label", { for: "token" }, "Gateway token"),
    input,
    h("p", { class: "help", id: "token-help" }, "The file ", h("code", {}, "gateway.token"),
      " in the gateway’s home holds it, unless ", h("code", {}, "MILLRACE_TOKEN"), " was set. It is kept in this tab only."),
    message,
    button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    say(message, "");
    const problem = await tried(input.value.trim(), signal);
    button.disabled = false;
    input.setAttribute("aria-invalid", Boolean(problem));
    say(message, problem);
    if (problem) input.focus();
  });
  put(place, form);
  input.focus();
}

/** What is wrong with the token; empty once it has been accepted. */
async function tried(token, signal) {
  if (!token) return "Type the token.";
  if (!/^[!-~]+$/.test(token)) return "A token has no spaces and only plain characters.";
  try {
    await read("/jobs?limit=1", { token, signal });
  } catch (error) {
    if (error.status === 401) return "This token is not the gateway’s.";
    return error.status ? `The gateway cannot check it now: ${error.message}.` : "The gateway does not answer.";
  }
  session.begin(token);
  return "";
}
