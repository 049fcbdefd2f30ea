// Runs side by side: their curves over one another, and the settings in which they differ.

import { jobPath, read } from "./api.js";
import { Chart } from "./chart.js";
import { Cursor } from "./cursor.js";
import { h, put, say } from "./dom.js";
import { count, duration, figure, score } from "./format.js";
import { poll } from "./poll.js";
import { badge, elapsed, ended } from "./state.js";
import { Table } from "./table.js";

/** Runs whose curves can still be told apart. */
export const MOST_COMPARED = 8;
const MOST_STEPS = 10_000;
const SEEN = 20; // newest steps whose figures are offered: a step in which nothing was judged has no reward
const AXES = { step: "steps", time: "seconds of run time", tokens: "trained tokens" };
const FIRST = ["reward", "avg_at_k", "trained_reward", "accuracy", "loss", "entropy", "grad_norm", "mismatch_kl_k3", "policy_age_mean", "response_length_mean"];
const NOT_DRAWN = new Set(["step", "at", "lineage", "k", "tasks", "policy_version", "min_policy_version", "max_policy_version", "optimizer_step"]);

/** The comparison of the jobs whose ids the address lists. */
export async function showCompare(place, signal, list = "") {
  const ids = [...new Set(list.split(",").filter(Boolean))].slice(0, MOST_COMPARED);
  const note = h("p", { class: "help", role: "status" }, "Loading…");
  const body = h("div", { class: "tab" });
  put(place,
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "All jobs")),
    h("div", { class: "title" }, h("div", {}, h("h1", { tabindex: "-1" }, "Compare runs"), note)), body);
  if (ids.length < 2) return void say(note, "Pick two runs or more in the list of jobs.");
  const overlay = new Overlay(ids, signal);
  const runs = new Table("Runs", RUNS);
  const settings = h("div", { class: "panel flush" });
  put(body,
    h("section", { "aria-labelledby": "runs-title" }, h("h2", { id: "runs-title" }, "Runs"), h("div", { class: "panel flush" }, runs.element)),
    h("section", { "aria-labelledby": "overlay-title" }, h("h2", { id: "overlay-title" }, "Curves"), overlay.element),
    h("section", { "aria-labelledby": "settings-title" }, h("h2", { id: "settings-title" }, "Settings that differ"), settings));
  const refresh = async () => {
    const found = await read(`/jobs/compare?${ids.map((id) => `job=${encodeURIComponent(id)}`).join("&")}`, { signal });
    say(note, `${ids.length} runs, ${count(found.differences.length)} settings differ`);
    runs.show(found.runs.map((run, i) => ({ ...run, place: i + 1 })));
    if (!settings.firstChild) put(settings, differenceTable(found));
    await overlay.show(found.runs);
    return found.runs.every(ended);
  };
  try {
    await poll(signal, 5, refresh);
  } catch (error) {
    if (!signal.aborted && error.status !== 401) say(note, `The runs cannot be compared: ${error.fields?.[0]?.message ?? error.message}`);
  }
}

const RUNS = [
  { label: "Run", head: true, cell: ({ id, name, place }) => [h("span", { class: `key s${place}` }), h("a", { href: `#/jobs/${id}` }, name), h("code", { class: "id" }, id)] },
  { label: "State", cell: (run) => badge(run) },
  { label: "Steps", number: true, cell: ({ step, steps }) => `${count(step)} / ${count(steps)}` },
  { label: "Last reward", number: true, cell: ({ reward }) => figure(reward ?? NaN) },
  { label: "Best held-out", number: true, cell: ({ best_eval }) => score(best_eval?.avg_at_k, best_eval?.avg_at_k_se) },
  { label: "Run time", number: true, cell: (run) => (run.started_at ? duration(elapsed(run)) : "–") },
  { label: "Tags", cell: ({ tags }) => tags.join(", ") || "–" },
];

function differenceTable({ runs, differences }) {
  if (!differences.length) return h("p", { class: "empty" }, "All settings are equal.");
  const table = new Table("Settings that differ", [
    { label: "Setting", head: true, cell: ({ path }) => h("code", { class: "path" }, path) },
    ...runs.map((run, i) => ({ label: run.id, cell: ({ values }) => h("code", { class: "path" }, JSON.stringify(values[i])) })),
  ]);
  table.show(differences);
  return table.element;
}

/** One figure of all runs, along steps, run time or trained tokens. */
class Overlay {
  #histories = new Map();

  constructor(ids, signal) {
    Object.assign(this, { ids, signal, runs: [] });
    this.figure = h("select", { id: "figure", onchange: () => this.#draw() });
    this.axis = h("select", { id: "axis", onchange: () => this.#redraw() }, Object.entries(AXES).map(([value, label]) => h("option", { value }, label)));
    this.smoothing = h("input", { type: "checkbox", id: "smooth", checked: true, onchange: () => this.#draw() });
    this.place = h("div", { class: "overlay" });
    this.element = h("div", {},
      h("div", { class: "tools" },
        h("label", { class: "choice" }, "Figure", this.figure), h("label", { class: "choice" }, "Along", this.axis),
        h("label", { class: "check" }, this.smoothing, "Smooth")),
      this.place);
  }

  /** Reads what is new of each run, and draws. */
  async show(runs) {
    this.runs = runs;
    await Promise.all(runs.map(async (run) => {
      const known = this.#histories.get(run.id);
      if (known && (known.ended || known.step === run.step)) return;
      const { steps, evals } = await read(jobPath(run.id, `/metrics?limit=${MOST_STEPS}`), { signal: this.signal });
      this.#histories.set(run.id, { steps, evals, step: run.step, ended: ended(run) });
    }));
    this.#offer();
    if (this.chart) this.#draw();
    else this.#redraw();
  }

  /** The figures that any run has, the usual ones first. */
  #offer() {
    const names = new Set();
    for (const { steps, evals } of this.#histories.values()) {
      for (const record of [...steps.slice(-SEEN), evals.at(-1)]) {
        for (const [name, value] of Object.entries(record ?? {})) if (Number.isFinite(value) && !NOT_DRAWN.has(name)) names.add(name);
      }
    }
    const ordered = [...FIRST.filter((name) => names.has(name)), ...[...names].filter((name) => !FIRST.includes(name)).sort()];
    if (this.offered === ordered.join()) return;
    this.offered = ordered.join();
    const chosen = this.figure.value;
    put(this.figure, ordered.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
    if (names.has(chosen)) this.figure.value = chosen;
  }

  /** A chart with another axis, and its cursor. */
  #redraw() {
    this.cursor = new Cursor(AXES[this.axis.value]);
    const series = this.runs.map(({ id }) => ({ label: id }));
    this.chart = new Chart({ title: "Figure of each run", series, along: AXES[this.axis.value] }, this.cursor, this.signal);
    put(this.place, this.cursor.element, this.chart.element);
    this.#draw();
  }

  #draw() {
    if (!this.chart) return;
    const name = this.figure.value;
    const points = this.runs.map((run) => along(this.axis.value, run, this.#histories.get(run.id), name));
    const last = Math.max(1, ...points.flatMap((list) => (list.length ? [list.at(-1)[0]] : [])));
    this.chart.rename(name.replaceAll("_", " "));
    this.cursor.reach(Math.round(last));
    this.chart.show(points, last, this.smoothing.checked);
  }
}

/** Points of a figure: the place on the axis, and the value. */
function along(axis, run, { steps, evals }, name) {
  const records = steps.some((record) => Number.isFinite(record[name])) ? steps : evals;
  const places = placesOf(axis, run, steps);
  return records.map((record) => [places(record), record[name]]).filter((point) => point.every(Number.isFinite));
}

/** From a record to its place on the axis. */
function placesOf(axis, run, steps) {
  if (axis === "step") return ({ step }) => step;
  if (axis === "time") {
    const ends = new Map(steps.map(({ step, at }) => [step, at]));
    return ({ step, at = ends.get(step) }) => Math.max(0, at - (run.started_at ?? at));
  }
  const tokens = new Map([[0, 0]]);
  let sum = 0;
  for (const { step, trained_tokens: trained = 0 } of steps) tokens.set(step, (sum += trained));
  return ({ step }) => tokens.get(step) ?? sum;
}
