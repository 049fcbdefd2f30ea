// A line chart in SVG: axes, curves, dots, a bound, and a readout for the step under the cursor.

import { h, put, s, say } from "./dom.js";
import { figure, round } from "./format.js";
import { extent, linear, middle, smooth, thin, ticks } from "./scale.js";

const HEIGHT = 148;
const EDGE = { left: 42, right: 16, top: 8, bottom: 20 };

/**
 * `series` are `{label, dots?, plain?}`: dots for few points, plain for what is not smoothed; `axis` is given to `extent`;
 * `bound` draws a line that must not be crossed; `along` is what the axis counts.
 */
export class Chart {
  constructor({ title, unit = "", series, axis = {}, bound = null, along = "steps" }, cursor, signal) {
    Object.assign(this, { title, series, axis, bound, along, cursor, smoothed: true, points: series.map(() => []), last: 1 });
    this.readouts = series.map(() => h("b", {}));
    const key = ({ label, dots }, i) => h("span", { class: `key s${i + 1} ${dots ? "dots" : ""}` }, label, " ", this.readouts[i]);
    this.svg = s("svg", { role: "img", height: HEIGHT, class: "plot" });
    this.empty = h("p", { class: "help" }, "No figures yet");
    this.element = h("figure", { class: "chart panel" },
      h("figcaption", {}, (this.heading = h("h3", {}, title, unit ? h("small", {}, ` ${unit}`) : null)), h("p", { class: "legend" }, series.map(key))),
      this.svg, this.empty);
    this.svg.addEventListener("pointermove", (event) => this.#point(event), { signal });
    this.svg.addEventListener("pointerleave", () => cursor.move(null), { signal });
    cursor.addEventListener("moved", () => this.#mark(), { signal });
    const observer = new ResizeObserver(() => this.#draw());
    observer.observe(this.element);
    signal.addEventListener("abort", () => observer.disconnect(), { once: true });
  }

  /** Gives the chart another title. */
  rename(title) {
    this.title = title;
    say(this.heading, title);
  }

  /** Shows these points, one list of `[step, value]` for each series, on an axis up to `last`. */
  show(points, last, smoothed) {
    this.points = points.map((list) => list.filter(([, y]) => Number.isFinite(y)));
    this.last = last;
    this.smoothed = smoothed;
    this.#draw();
  }

  #draw() {
    const width = Math.floor(this.element.clientWidth) - 2;
    const filled = this.points.some((list) => list.length);
    this.svg.toggleAttribute("hidden", !filled);
    this.empty.hidden = filled;
    if (!filled || width < 60) return this.#mark();
    const values = this.points.flatMap((list, i) => this.#shown(list.map(([, y]) => y), i));
    const range = extent(this.bound === null ? values : [...values, this.bound], this.axis);
    const first = Math.min(1, ...this.points.flat().map(([x]) => x));
    this.x = linear([first, Math.max(first + 1, this.last)], [EDGE.left, width - EDGE.right]);
    this.y = linear(range, [HEIGHT - EDGE.bottom, EDGE.top]);
    this.width = width;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.mark = s("g", { class: "mark" });
    put(this.svg, this.#grid(range, first), this.#bound(), this.points.map((list, i) => this.#curve(list, i)).reverse(), this.mark);
    this.#mark();
  }

  /** What the axis must reach: beside a smoothed curve, single peaks may leave the picture. */
  #shown(values, i) {
    return this.smoothed && !this.series[i].dots ? middle(values) : values;
  }

  #grid(range, first) {
    const rows = ticks(...range, 4).map((value) => [
      s("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: this.y(value), y2: this.y(value), class: "grid" }),
      s("text", { x: EDGE.left - 6, y: this.y(value) + 4, "text-anchor": "end" }, round(value)),
    ]);
    const steps = ticks(first, this.last, this.width / 90).filter(Number.isInteger);
    const columns = steps.map((step) => s("text", { x: this.x(step), y: HEIGHT - 5, "text-anchor": "middle" }, round(step)));
    return s("g", { "aria-hidden": "true" }, rows, columns);
  }

  #bound() {
    if (this.bound === null) return null;
    return s("line", { x1: EDGE.left, x2: this.width - EDGE.right, y1: this.y(this.bound), y2: this.y(this.bound), class: "bound" });
  }

  #curve(list, i) {
    if (this.series[i].dots) {
      return s("g", { class: `s${i + 1}` }, this.#path(list, "faint"),
        list.map(([x, y]) => s("circle", { cx: this.x(x), cy: this.y(y), r: 3.5 })));
    }
    const span = this.smoothed && !this.series[i].plain ? Math.min(50, list.length / 12) : 1;
    if (span < 2) return s("g", { class: `s${i + 1}` }, this.#path(list, "curve"));
    return s("g", { class: `s${i + 1}` }, this.#path(list, "faint"), this.#path(smooth(list, span), "curve"));
  }

  #path(list, kind) {
    const places = thin(list, this.width).map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`);
    return s("polyline", { points: places.join(" "), class: kind });
  }

  #point(event) {
    const place = event.clientX - this.svg.getBoundingClientRect().left;
    const share = (place - EDGE.left) / (this.width - EDGE.left - EDGE.right);
    this.cursor.move(Math.max(1, Math.min(this.last, Math.round(share * this.last))));
  }

  /** The figures at the cursor's step, in the legend, on the curves and for screen readers. */
  #mark() {
    const step = this.cursor.step;
    const at = this.points.map((list) => nearest(list, step));
    at.forEach((point, i) => say(this.readouts[i], point ? figure(point[1]) : "–"));
    const told = at.map((point, i) => `${this.series[i].label} ${point ? figure(point[1]) : "none"}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}, at ${this.along === "steps" ? "step" : this.along} ${round(Math.round(step ?? this.last))}: ${told}`);
    if (!this.mark) return;
    put(this.mark, step === null ? null : [
      s("line", { x1: this.x(step), x2: this.x(step), y1: EDGE.top, y2: HEIGHT - EDGE.bottom, class: "rule" }),
      at.map((point, i) => (point ? s("circle", { cx: this.x(point[0]), cy: this.y(point[1]), r: 3, class: `s${i + 1}` }) : null)),
    ]);
  }
}

/** The newest point up to a step; the newest of all without one. */
function nearest(list, step) {
  if (step === null) return list.at(-1);
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle][0] <= step) low = middle + 1;
    else high = middle;
  }
  return list[low - 1];
}
