// Submitting a job: a text, JSON or YAML, and a form of its main settings. What is valid, the API alone decides.

import { jobPath, read } from "./api.js";
import { announce, h, put, say } from "./dom.js";
import { Editor } from "./editor.js";
import { Fields } from "./fields.js";
import { lineIn, lineOf } from "./locate.js";

/** The form, beginning with the example, or with the spec of the job that is named. */
export async function showSubmit(place, signal, like = "") {
  const told = h("p", { class: "help", id: "submit-help" }, "Loading…");
  put(place, h("div", { class: "title" }, h("div", {}, h("h1", { tabindex: "-1" }, "Submit a job"), told)));
  let schema, catalog, begin;
  try {
    [schema, catalog, begin] = await Promise.all([read("/jobs/schema", { signal }), offers(signal), beginning(like, signal)]);
  } catch (error) {
    if (!signal.aborted) say(told, `The form cannot be made: ${error.message}`);
    return;
  }
  say(told, "Edit the settings or the text: both are one spec. Everything left out keeps its default.");
  new Submission(place, schema, catalog, begin, signal);
}

const beginning = async (like, signal) =>
  like ? (await read(jobPath(like), { signal })).spec : (await fetch("example.json", { signal })).json();

/** The models, data and verifiers that are there; a form without them is still one. */
const offers = (signal) => read("/catalog", { signal }).catch(() => ({}));

class Submission {
  #sent = { text: null, key: null };

  constructor(place, schema, catalog, begin, signal) {
    this.signal = signal;
    this.fields = new Fields(schema, catalog, (path, value) => this.#set(path, value));
    this.editor = new Editor("spec", () => this.#typed());
    this.note = h("p", { class: "help" });
    this.problems = h("div", { class: "problems", role: "alert", tabindex: "-1" });
    this.button = h("button", { class: "main" }, "Submit the job");
    const file = h("input", { type: "file", id: "file", accept: ".json,.yaml,.yml", onchange: () => this.#open(file.files[0]) });
    const form = h("form", { class: "submit", method: "post", novalidate: true, onsubmit: (event) => this.#submit(event) },
      h("section", { class: "panel", "aria-label": "Main settings" }, this.fields.element),
      h("section", { class: "panel text-side", "aria-label": "The whole spec" },
        h("div", { class: "title" }, h("label", { for: "spec", class: "strong" }, "The whole spec", h("small", {}, " JSON or YAML")),
          h("label", { class: "choice", for: "file" }, "Open a file", file)),
        this.editor.element, this.note, this.problems, h("div", { class: "actions" }, this.button)));
    place.append(form);
    this.editor.text = JSON.stringify(begin, null, 2);
    this.#typed();
  }

  /** The text as a document; null unless it is a JSON object. */
  #document() {
    try {
      const document = JSON.parse(this.editor.text);
      return document !== null && typeof document === "object" && !Array.isArray(document) ? document : null;
    } catch {
      return null;
    }
  }

  #typed() {
    const document = this.#document();
    this.fields.show(document);
    say(this.note, document ? "" : "This is not a JSON object, so the form rests; the text is sent as YAML, as it stands.");
  }

  #set(path, value) {
    const document = this.#document();
    if (!document) return;
    const keys = path.split(".");
    const last = keys.pop();
    const section = keys.reduce((at, key) => (isObject(at[key]) ? at[key] : (at[key] = {})), document);
    if (value === undefined) delete section[last];
    else section[last] = value;
    this.editor.text = JSON.stringify(document, null, 2);
  }

  async #open(file) {
    if (!file) return;
    this.editor.text = await file.text();
    this.#explain([]);
    this.#typed();
  }

  async #submit(event) {
    event.preventDefault();
    const text = this.editor.text;
    // The same text sent again after a lost answer is the same job, not a second one.
    if (this.#sent.text !== text) this.#sent = { text, key: token() };
    this.button.disabled = true;
    this.#explain([]);
    try {
      const type = text.trimStart().startsWith("{") ? "application/json" : "application/yaml";
      const headers = { "Content-Type": type, "Idempotency-Key": this.#sent.key };
      const job = await read("/jobs", { method: "POST", body: text, headers, signal: this.signal });
      announce(`${job.id} was taken in`);
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      if (this.signal.aborted) return;
      const message = error.status ? error.message : "The gateway does not answer. The same text can be sent again.";
      this.#explain(error.fields?.length ? error.fields : [{ field: "", message }]);
      this.problems.focus();
    } finally {
      this.button.disabled = false;
    }
  }

  /** Shows what is wrong: at the fields, at the lines of the text, and all of it in a list that leads there. */
  #explain(problems) {
    const shown = this.fields.explain(problems);
    const line = ({ field, message }) => (field === "spec" ? lineIn(message) : field ? lineOf(this.editor.text, field) : null);
    const lines = problems.map(line);
    this.editor.mark(lines.filter((line) => line !== null));
    const item = ({ field, message }, i) =>
      h("li", {}, shown.has(field) ? this.#link(field, () => this.fields.focus(field)) : h("code", {}, field), " ", message, " ",
        lines[i] === null ? null : this.#link(`line ${lines[i] + 1}`, () => this.editor.go(lines[i])));
    put(this.problems, problems.length ? [h("p", {}, "The job was not taken in:"), h("ul", {}, problems.map(item))] : null);
  }

  #link(text, go) {
    return h("button", { type: "button", class: "link", onclick: go }, text);
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** A random word; getRandomValues is there on plain HTTP too. */
const token = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
