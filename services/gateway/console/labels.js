// A job's tags and notes: shown, and changed in a dialog.

import { jobPath, read } from "./api.js";
import { h, put, say } from "./dom.js";

const dialog = document.getElementById("dialog");

/** The line with tags and notes; `changed(job)` is called with the record that the API answers. */
export class Labels {
  constructor(signal, changed) {
    Object.assign(this, { signal, changed });
    this.shown = h("span", {});
    this.element = h("p", { class: "labels" }, this.shown,
      h("button", { type: "button", class: "small", onclick: () => this.job && this.#edit() }, "Edit tags and notes"));
  }

  show(job) {
    this.job = job;
    const key = JSON.stringify([job.tags, job.notes]);
    if (this.key === key) return;
    this.key = key;
    put(this.shown, job.tags.map((tag) => h("a", { class: "tag", href: `#/jobs?tag=${encodeURIComponent(tag)}` }, tag)), job.notes ? h("span", {}, ` ${job.notes} `) : null);
  }

  #edit() {
    const tags = h("input", { id: "label-tags", value: this.job.tags.join(", "), autocomplete: "off", spellcheck: "false" });
    const notes = h("textarea", { id: "label-notes", rows: "4" }, this.job.notes);
    const problem = h("p", { class: "problem", role: "alert" });
    const save = async (event) => {
      event.preventDefault();
      const body = JSON.stringify({ tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), notes: notes.value.trim() });
      try {
        const headers = { "Content-Type": "application/json" };
        this.changed(await read(jobPath(this.job.id), { method: "PATCH", body, headers, signal: this.signal }));
        dialog.close();
      } catch (error) {
        say(problem, error.fields?.length ? error.fields.map(({ field, message }) => `${field}: ${message}`).join("; ") : error.message);
      }
    };
    put(dialog, h("form", { class: "label-form", method: "dialog", onsubmit: save },
      h("h2", { id: "dialog-title" }, `Labels of ${this.job.name}`),
      h("div", {}, h("label", { for: "label-tags" }, "Tags, with commas between them"), tags),
      h("div", {}, h("label", { for: "label-notes" }, "Notes"), notes), problem,
      h("div", { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Leave them"), h("button", { class: "main" }, "Save"))));
    dialog.showModal();
    this.signal.addEventListener("abort", () => dialog.close(), { once: true });
  }
}
