// Talk with a policy: the newest of a running job, or the exported one of a job that has ended. Nothing is kept.

import { read, request } from "./api.js";
import { h, put, say } from "./dom.js";
import { messages } from "./stream.js";

/** The view; `job`: the policy that is chosen at first. */
export async function showChat(place, signal, job = "") {
  const note = h("p", { class: "help", role: "status" }, "Loading…");
  put(place, h("div", { class: "title" }, h("div", {}, h("h1", { tabindex: "-1" }, "Chat"), note)));
  let models;
  try {
    ({ data: models } = await read("/v1/models", { signal }));
  } catch (error) {
    if (!signal.aborted) say(note, `The policies cannot be read: ${error.message}`);
    return;
  }
  if (!models.length) return void say(note, "No policy can be talked to: a job must run, or have ended with an exported checkpoint.");
  say(note, "Answers are samples of the policy as it is now. Nothing of it is kept or trained on.");
  place.append(new Chat(models.map(({ id }) => id), job, signal).element);
}

class Chat {
  #turns = [];

  constructor(models, job, signal) {
    this.signal = signal;
    this.model = h("select", { id: "model", onchange: () => this.#begin() }, models.map((id) => h("option", { value: id }, id)));
    if (models.includes(job)) this.model.value = job;
    this.talk = h("ol", { class: "talk", "aria-label": "Conversation", "aria-live": "polite" });
    this.text = h("textarea", { id: "message", rows: "3", onkeydown: (event) => this.#key(event) });
    this.problem = h("p", { class: "problem", role: "alert" });
    this.send = h("button", { class: "main" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.stopping?.abort() }, "Stop");
    const anew = h("button", { type: "button", onclick: () => this.#begin() }, "New conversation");
    this.element = h("form", { class: "chat", method: "post", onsubmit: (event) => this.#submit(event) },
      h("label", { class: "choice" }, "Policy", this.model), this.talk,
      h("div", {}, h("label", { for: "message" }, "Message"), this.text), this.problem,
      h("div", { class: "actions" }, this.send, this.stop, anew));
  }

  #begin() {
    this.stopping?.abort();
    this.#turns = [];
    put(this.talk);
    say(this.problem, "");
    this.text.focus();
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.element.requestSubmit();
    }
  }

  async #submit(event) {
    event.preventDefault();
    const content = this.text.value.trim();
    if (!content || this.stopping) return;
    this.text.value = "";
    say(this.problem, "");
    this.#turns.push({ role: "user", content });
    this.talk.append(turn("user", "You", content));
    await this.#answer();
  }

  async #answer() {
    const turns = this.#turns;
    const stopping = (this.stopping = new AbortController());
    const stop = () => stopping.abort();
    this.signal.addEventListener("abort", stop, { once: true });
    [this.send.disabled, this.stop.hidden] = [true, false];
    const shown = turn("assistant", this.model.value, "");
    this.talk.append(shown);
    const text = shown.querySelector(".text");
    let answer = "";
    try {
      for await (const piece of pieces(this.model.value, turns, stopping.signal)) text.textContent = answer += piece;
    } catch (error) {
      if (!stopping.signal.aborted) say(this.problem, error.status ? `No answer: ${error.message}` : "The answer broke off: the gateway does not answer.");
    }
    if (answer) turns.push({ role: "assistant", content: answer });
    else shown.remove();
    this.stopping = null;
    [this.send.disabled, this.stop.hidden] = [false, true];
  }
}

const turn = (role, who, content) => h("li", { class: role }, h("p", { class: "who" }, who), h("div", { class: "text" }, content));

/** The pieces of an answer, as they are sampled. */
async function* pieces(model, turns, signal) {
  const body = JSON.stringify({ model, messages: turns, stream: true });
  const response = await request("/v1/chat/completions", { method: "POST", body, headers: { "Content-Type": "application/json" }, signal });
  for await (const { data } of messages(response.body, signal)) {
    if (data === "[DONE]") return;
    const { choices = [], error } = JSON.parse(data);
    if (error) throw Object.assign(new Error(error.message), { status: 500 });
    if (choices[0]?.delta?.content) yield choices[0].delta.content;
  }
}
