// All jobs, newest first.

import { read } from "./api.js";
import { announce, h, put, say } from "./dom.js";
import { ago, count, duration, moment } from "./format.js";
import { poll } from "./poll.js";
import { badge, bar, elapsed } from "./state.js";
import { Table } from "./table.js";

const PAGE = 50;

/** The list of jobs; `page` counts from 1. */
export function showJobs(place, signal, page = "1") {
  const first = (Math.max(1, Number.parseInt(page, 10) || 1) - 1) * PAGE;
  const total = h("p", { class: "help" }, "Loading…");
  const list = h("div", { class: "panel flush", hidden: true });
  const pages = h("nav", { class: "pages", "aria-label": "Pages of jobs" });
  const table = new Table("Jobs, newest first", COLUMNS);
  const states = new Map();
  put(place,
    h("div", { class: "title" },
      h("div", {}, h("h1", { tabindex: "-1" }, "Jobs"), total),
      h("a", { class: "button main", href: "#/submit" }, "Submit a job")),
    list, pages);

  poll(signal, 2, async () => {
    const answer = await read(`/jobs?limit=${PAGE}&offset=${first}`, { signal });
    say(total, answer.total === 1 ? "1 job" : `${count(answer.total)} jobs`);
    list.hidden = false;
    if (answer.jobs.length) refresh(table, answer.jobs, states);
    if (!list.firstChild || (answer.jobs.length > 0) !== list.contains(table.element)) {
      put(list, answer.jobs.length ? table.element : empty());
    }
    pageLinks(pages, first, answer.total);
  });
}

const COLUMNS = [
  { label: "Job", head: true, cell: (job) => [h("a", { href: `#/jobs/${job.id}` }, job.name), h("code", { class: "id" }, job.id)] },
  { label: "State", cell: (job) => [badge(job), job.cause ? h("span", { class: "cause" }, job.cause) : null] },
  { label: "Progress", cell: (job) => progress(job) },
  { label: "Policy", number: true, cell: (job) => `v${job.policy_version}` },
  { label: "Groups trained", number: true, cell: (job) => count(job.groups.trained ?? 0) },
  { label: "Run time", number: true, cell: (job) => (job.started_at ? duration(elapsed(job)) : "–") },
  { label: "Submitted", cell: (job) => h("time", { title: moment(job.created_at) }, ago(job.created_at)) },
];

const progress = (job) =>
  h("div", { class: "progress" }, bar(job), h("span", {}, `${count(job.step)} / ${count(job.steps)}`));

/** Shows the rows, and tells of states that have changed. */
function refresh(table, jobs, states) {
  table.show(jobs);
  for (const job of jobs) {
    const before = states.get(job.id);
    if (before && before !== job.state) announce(`${job.name} is ${job.state}`);
    states.set(job.id, job.state);
  }
}

const empty = () =>
  h("div", { class: "empty" },
    h("p", {}, "No jobs yet."),
    h("p", {}, h("a", { href: "#/submit" }, "Submit one here"), ", or with ", h("code", {}, "millrace submit FILE"), "."));

function pageLinks(place, first, total) {
  const links = [];
  const page = first / PAGE + 1;
  if (first > 0) links.push(h("a", { href: `#/jobs-page/${page - 1}` }, "Newer"));
  if (first + PAGE < total) links.push(h("a", { href: `#/jobs-page/${page + 1}` }, "Older"));
  put(place, links);
}
