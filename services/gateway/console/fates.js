// What became of a job's groups, as one bar and its figures.

import { h, put } from "./dom.js";
import { count, percent } from "./format.js";

const FATES = [
  ["trained", "one optimizer step used it"],
  ["degenerate", "all accuracies equal: no advantage"],
  ["stale", "older than the off-policy bound"],
  ["failed", "could not be sampled or judged"],
  ["cancelled", "given up when the job ended"],
  ["active", "still on its way"],
];

const why = ([reason, times]) => h("li", {}, h("b", {}, `${count(times)} ×`), " ", reason);

/** The bar and why groups failed; its parts add up to the groups issued. */
export class Fates {
  element = h("div", { class: "fates panel" });

  show({ groups, failed_reasons: reasons = {} }) {
    const issued = groups.issued ?? 0;
    const part = ([fate]) => {
      const piece = h("span", { class: `fate-${fate}` });
      piece.style.flexGrow = groups[fate] ?? 0;
      return groups[fate] ? piece : null;
    };
    const entry = ([fate, meaning]) =>
      h("div", { title: meaning }, h("dt", { class: `key fate-${fate}` }, fate),
        h("dd", {}, count(groups[fate] ?? 0), h("small", {}, groups[fate] ? ` ${percent(groups[fate] / issued)}` : "")));
    put(this.element,
      h("div", { class: "stack", "aria-hidden": "true" }, issued ? FATES.map(part) : null),
      h("dl", {}, h("div", {}, h("dt", {}, "issued"), h("dd", {}, count(issued))), FATES.map(entry)),
      Object.keys(reasons).length ? h("ul", { class: "reasons", "aria-label": "Why groups failed" }, Object.entries(reasons).map(why)) : null);
  }
}
