// What a job's state looks like, and what can be done in it.

import { h } from "./dom.js";

export const ended = (job) => ["succeeded", "failed", "cancelled"].includes(job.state);

/** The state as a badge: a word with a coloured mark. */
export function badge(job) {
  const word = passing(job) ?? job.state;
  return h("span", { class: `badge state-${word}` }, word);
}

/** The word for a request that the learner has not followed yet; null when there is none. */
function passing(job) {
  if (ended(job)) return null;
  if (job.cancel_requested) return "cancelling";
  if (job.state === "paused") return job.pause_requested ? null : "resuming";
  return job.pause_requested ? "pausing" : null;
}

/** A bar of the steps made. */
export const bar = (job) =>
  h("progress", { max: job.steps, value: job.step, "aria-label": `Progress of ${job.name}` }, `${job.step} of ${job.steps}`);

/** Seconds that the job has run; NaN before it has started. */
export const elapsed = (job) => (job.finished_at ?? Date.now() / 1000) - (job.started_at ?? NaN);

/** The buttons that fit the state: `{verb, label, danger?}`. */
export function actions(job) {
  if (ended(job)) return [{ verb: "delete", label: "Delete", danger: true }];
  if (job.cancel_requested) return [];
  const cancel = { verb: "cancel", label: "Cancel", danger: true };
  if (job.pause_requested) return [{ verb: "resume", label: "Resume" }, cancel];
  return [{ verb: "pause", label: "Pause" }, cancel];
}
