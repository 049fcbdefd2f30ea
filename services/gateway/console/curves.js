// A job's curves, live.

import { Chart } from "./chart.js";
import { Cursor } from "./cursor.js";
import { h, put } from "./dom.js";
import { Fates } from "./fates.js";
import { figure } from "./format.js";
import { History } from "./history.js";
import { Table } from "./table.js";

const SHOWN_STEPS = 12;
const ZERO = { zero: true };
const SHARE = { most: 1 };

/** Each chart: its title and unit, and for each of its curves a label and the record's field; `ifAny`: hidden until a step has one. */
const charts = ({ spec }) => [
  { title: "Reward and accuracy", axis: SHARE, curves: [["reward", "reward"], ["accuracy", "accuracy"]] },
  { title: "Held-out evaluation", axis: SHARE, evals: true, curves: [
    [`avg@${spec.eval.samples}`, "avg_at_k"], [`pass@${spec.eval.samples}`, "pass_at_k"]] },
  { title: "Accept rate", unit: "informative groups", axis: SHARE, curves: [["accept rate", "accept_rate"]] },
  { title: "Policy age", unit: "steps", axis: ZERO, bound: spec.off_policy.max_off_policy_steps, curves: [
    ["mean", "policy_age_mean"], ["max", "policy_age_max", "plain"]] },
  { title: "Throughput", unit: "tokens/s", axis: ZERO, curves: [
    ["generated", "generated_tokens_per_s"], ["trained", "trained_tokens_per_s"]] },
  { title: "Weight sync", unit: "s", axis: ZERO, curves: [["fetch and pause", "sync_s"], ["generation paused", "pause_s"]] },
  { title: "Step time", unit: "s", axis: ZERO, curves: [["whole step", "step_s"], ["waiting for groups", "wait_s"]] },
  { title: "Loss", curves: [["loss", "loss"]] },
  { title: "Mismatch KL", unit: "trainer against engine", axis: ZERO, curves: [["k3", "mismatch_kl_k3"]] },
  { title: "Entropy", unit: "nats per token", axis: ZERO, curves: [["entropy", "entropy"]] },
  { title: "Gradient norm", axis: ZERO, curves: [["before clipping", "grad_norm"]] },
  { title: "Response length", unit: "tokens", axis: ZERO, curves: [
    ["mean", "response_length_mean"], ["95th percentile", "response_length_p95"]] },
  { title: "Turns", unit: "per episode", ifAny: true, axis: ZERO, curves: [["mean", "turns_mean"]] },
  { title: "Reference KL", unit: "nats", ifAny: true, axis: ZERO, curves: [["KL", "reference_kl"], ["coefficient", "kl_coefficient"]] },
  { title: "Value loss", ifAny: true, axis: ZERO, curves: [["value loss", "value_loss"]] },
  { title: "Explained variance", unit: "of the returns", ifAny: true, axis: SHARE, curves: [["explained variance", "explained_variance"]] },
  { title: "Values and returns", ifAny: true, curves: [["values", "value_mean"], ["returns", "return_mean"]] },
  { title: "Load of experts", unit: "of the mean", ifAny: true, axis: ZERO, curves: [["busiest", "router_load_max"], ["least busy", "router_load_min"]] },
  { title: "Router entropy", unit: "nats", ifAny: true, axis: ZERO, curves: [["entropy", "router_entropy"]] },
  { title: "Clipped tokens", unit: "share", ifAny: true, axis: ZERO, curves: [["above", "clip_fraction_high"], ["below", "clip_fraction_low"]] },
  { title: "Clipped by dual_clip", unit: "share", ifAny: true, axis: ZERO, curves: [["clipped", "clip_fraction_dual"]] },
  { title: "Masked tokens", unit: "share, by advantage", ifAny: true, axis: ZERO, curves: [
    ["positive", "mask_fraction_positive"], ["negative", "mask_fraction_negative"]] },
];

/** The curves of a job; follows its events until it ends or the view goes. */
export async function showCurves(place, signal, job, changes) {
  const cursor = new Cursor();
  const smoothing = h("input", { type: "checkbox", id: "smooth", checked: true });
  const fates = new Fates();
  const table = new Table(`The newest ${SHOWN_STEPS} steps`, COLUMNS);
  const drawn = charts(job).map((plan) => ({
    plan,
    chart: new Chart({ ...plan, series: plan.curves.map(([label, , plain]) => ({ label, plain, dots: plan.evals })) }, cursor, signal),
  }));
  for (const { plan, chart } of drawn) chart.element.hidden = plan.ifAny === true;
  put(place,
    h("section", { "aria-labelledby": "fates-title" }, h("h2", { id: "fates-title" }, "Groups by fate"), fates.element),
    h("section", { "aria-labelledby": "curves-title" },
      h("div", { class: "title" }, h("h2", { id: "curves-title" }, "Curves"),
        h("div", { class: "tools" }, cursor.element,
          h("label", { class: "check", title: "Averages over steps; single peaks may leave the picture" }, smoothing, "Smooth"))),
      h("div", { class: "charts" }, drawn.map(({ chart }) => chart.element))),
    h("section", { "aria-labelledby": "steps-title" }, h("h2", { id: "steps-title" }, "Newest steps"),
      h("div", { class: "panel flush" }, table.element)));
  fates.show(job);
  changes.addEventListener("job", ({ detail }) => fates.show(detail), { signal });

  const history = new History();
  const draw = () => {
    const { steps, evals } = history;
    const last = Math.max(1, steps.at(-1)?.step ?? 0, evals.at(-1)?.step ?? 0);
    cursor.reach(last);
    for (const { plan, chart } of drawn) {
      const records = plan.evals ? evals : steps;
      const points = plan.curves.map(([, field]) => records.map((record) => [record.step, record[field]]));
      chart.element.hidden = plan.ifAny === true && !points.flat().some(([, y]) => Number.isFinite(y));
      chart.show(points, last, smoothing.checked);
    }
    table.show(steps.slice(-SHOWN_STEPS).reverse());
  };
  smoothing.addEventListener("change", draw);
  await history.follow(job.id, signal, once(draw));
}

/** Runs an action once for all calls that come before the next painting. */
function once(action) {
  let asked = false;
  return () => {
    if (!asked) requestAnimationFrame(() => ((asked = false), action()));
    asked = true;
  };
}

const COLUMNS = [
  { label: "Step", head: true, cell: (step) => step.step },
  ...[["Reward", "reward"], ["Accuracy", "accuracy"], ["Accept", "accept_rate"], ["Age, mean", "policy_age_mean"],
    ["Generated tok/s", "generated_tokens_per_s"], ["Trained tok/s", "trained_tokens_per_s"],
    ["Sync, s", "sync_s"], ["Pause, s", "pause_s"], ["Loss", "loss"], ["Mismatch KL", "mismatch_kl_k3"]]
    .map(([label, field]) => ({ label, number: true, cell: (step) => figure(step[field]) })),
];
