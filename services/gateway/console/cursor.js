// The place on the axis that all charts show figures for: one slider, which a pointer over any chart moves too. Without a choice: the newest.

import { h, say } from "./dom.js";

/** Fires "moved"; `step` is null while it follows the newest. */
export class Cursor extends EventTarget {
  step = null;

  /** `along`: what the axis counts. */
  constructor(along = "steps") {
    super();
    const move = () => this.move(Number(this.slider.value));
    this.slider = h("input", { type: "range", id: "cursor", min: "1", max: "1", value: "1", oninput: move });
    this.output = h("output", { for: "cursor" }, "newest");
    this.back = h("button", { type: "button", class: "quiet small", hidden: true, onclick: () => this.move(null) }, "Back to newest");
    this.element = h("div", { class: "cursor" }, h("label", { for: "cursor" }, along === "steps" ? "Figures at step" : `Figures at ${along}`), this.slider, this.output, this.back);
  }

  /** The steps that there are. */
  reach(newest) {
    this.slider.max = Math.max(1, newest);
    if (this.step === null) this.slider.value = this.slider.max;
  }

  move(step) {
    if (step === this.step) return;
    this.step = step;
    this.slider.value = step ?? this.slider.max;
    this.back.hidden = step === null;
    say(this.output, step === null ? "newest" : String(step));
    this.dispatchEvent(new Event("moved"));
  }
}
