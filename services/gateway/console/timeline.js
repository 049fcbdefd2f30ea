// What happened to a job, in its own words: states, evaluations, checkpoints, stalls; its steps are in the curves.

import { jobPath } from "./api.js";
import { h, put } from "./dom.js";
import { duration, figure, moment } from "./format.js";
import { events } from "./stream.js";

const MOST = 500;

/** The events, newest first, as they come. */
export async function showTimeline(place, signal, job) {
  const list = h("ol", { class: "timeline panel", reversed: true });
  const none = h("p", { class: "help" }, "Nothing yet.");
  put(place, h("h2", {}, "Events"), none, list);
  for await (const event of events(jobPath(job.id, "/events"), { signal })) {
    if (event.kind === "step") continue;
    none.hidden = true;
    list.prepend(h("li", {},
      h("time", { title: `${duration(event.data.at - job.created_at)} after it was submitted` }, moment(event.data.at)),
      h("span", { class: `badge state-${event.data.state ?? event.kind}` }, event.data.state ?? event.kind),
      h("span", { class: "told" }, told(event))));
    if (list.childElementCount > MOST) list.lastElementChild.remove();
  }
}

/** The event's own words, else its fields. */
function told({ kind, data }) {
  const { at, state, cause, message, ...rest } = data;
  if (kind === "state") return cause ?? "";
  if (message) return message;
  return Object.entries(rest).map(([name, value]) => `${name} ${shown(value)}`).join(", ");
}

const shown = (value) => (typeof value === "number" ? figure(value) : typeof value === "string" ? value : JSON.stringify(value));
