// One job: its head, which stays, and one of four views below it.

import { jobPath, read } from "./api.js";
import { showCurves } from "./curves.js";
import { announce, h, put } from "./dom.js";
import { JobHead } from "./head.js";
import { poll } from "./poll.js";
import { showSamples } from "./samples.js";
import { showSpec } from "./spec.js";
import { ended } from "./state.js";
import { showTimeline } from "./timeline.js";

const TABS = [
  ["", "Curves", showCurves],
  ["samples", "Samples", showSamples],
  ["events", "Events", showTimeline],
  ["spec", "Spec", showSpec],
];

/** The job with this id; `tab` names the view below its head. */
export async function showJob(place, signal, id, tab = "") {
  const head = new JobHead(id, signal);
  const body = h("div", { class: "tab" });
  put(place, head.element, tabs(id, tab), body);
  const changes = new EventTarget(); // "job": the record was read again
  const show = (TABS.find(([name]) => name === tab) ?? TABS[0])[2];
  let state;

  const fill = (job) => Promise.resolve(show(body, signal, job, changes)).catch((error) => {
    if (!signal.aborted && error.status !== 401) put(body, h("p", { class: "problem", role: "alert" }, error.message));
  });
  const refresh = async () => {
    const job = await read(jobPath(id), { signal });
    head.show(job);
    changes.dispatchEvent(new CustomEvent("job", { detail: job }));
    if (state === undefined) fill(job);
    else if (state !== job.state) announce(`${job.name} is ${job.state}`);
    state = job.state;
    return ended(job);
  };
  head.refresh = refresh;
  try {
    await poll(signal, 2, refresh);
  } catch (error) {
    if (error.status !== 401) missing(place, error);
  }
}

function tabs(id, tab) {
  const link = ([name, label]) =>
    h("a", { href: `#/jobs/${encodeURIComponent(id)}${name && `/${name}`}`, "aria-current": name === tab ? "page" : null }, label);
  return h("nav", { class: "tabs", "aria-label": "Views of the job" }, TABS.map(link));
}

const missing = (place, error) =>
  put(place,
    h("h1", { tabindex: "-1" }, error.status === 404 ? "No such job" : "The job cannot be read"),
    h("p", {}, error.status === 404 ? "There is no job of this id." : error.message, " ", h("a", { href: "#/jobs" }, "All jobs")));
