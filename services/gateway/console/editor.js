// A text area with line numbers, on which lines can be marked as wrong.

import { h, put } from "./dom.js";

/** `element` holds it; `changed` is called after each change of its text. */
export class Editor {
  #wrong = new Set();

  constructor(id, changed) {
    this.gutter = h("div", { class: "gutter", "aria-hidden": "true" });
    this.input = h("textarea", {
      id, wrap: "off", spellcheck: "false", autocapitalize: "none", autocomplete: "off", rows: "26",
      oninput: () => (this.#number(), changed()),
      onscroll: () => (this.gutter.scrollTop = this.input.scrollTop),
    });
    this.element = h("div", { class: "editor" }, this.gutter, this.input);
  }

  get text() {
    return this.input.value;
  }

  set text(text) {
    this.input.value = text;
    this.#number();
  }

  /** Marks these lines (from 0), and no others. */
  mark(lines) {
    this.#wrong = new Set(lines);
    this.input.setAttribute("aria-invalid", this.#wrong.size > 0);
    this.#number();
  }

  /** Puts the cursor at a line and selects it. */
  go(line) {
    const lines = this.text.split("\n");
    const start = lines.slice(0, line).reduce((sum, text) => sum + text.length + 1, 0);
    this.input.focus();
    this.input.setSelectionRange(start, start + (lines[line]?.length ?? 0));
    this.input.scrollTop = Math.max(0, (line - 5) * (this.input.scrollHeight / lines.length));
  }

  #number() {
    const lines = this.text.split("\n").length;
    put(this.gutter, Array.from({ length: lines }, (_, n) => h("span", { class: this.#wrong.has(n) ? "wrong" : null }, n + 1)));
    this.gutter.scrollTop = this.input.scrollTop;
  }
}
