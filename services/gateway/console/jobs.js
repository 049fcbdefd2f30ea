// All jobs as a table of runs: searched, ordered, and picked for a comparison.

import { address, remember } from "./address.js";
import { read } from "./api.js";
import { MOST_COMPARED } from "./compare.js";
import { announce, h, put, say } from "./dom.js";
import { ago, count, duration, figure, moment, score } from "./format.js";
import { poll } from "./poll.js";
import { badge, bar, elapsed } from "./state.js";
import { Table } from "./table.js";

const PAGE = 50;
const STATES = ["queued", "starting", "running", "stalled", "paused", "succeeded", "failed", "cancelled"];
const ORDERS = {
  submitted: "time of submission", name: "name", state: "state", model: "model", data: "data", step: "steps", reward: "last reward",
  best_score: "best held-out score", run_time: "run time",
};
const picked = new Set(); // ids, kept while the page is open

/** The table of jobs that the address's query selects: search, state, tag, sort, ascending, page. */
export function showJobs(place, signal) {
  const { query } = address();
  const total = h("p", { class: "help", role: "status" }, "Loading…");
  const list = h("div", { class: "panel flush", hidden: true });
  const pages = h("nav", { class: "pages", "aria-label": "Pages of jobs" });
  const comparison = h("div", { class: "actions" });
  const states = new Map();
  const differences = new Differences(signal, () => draw());
  let [answer, latest] = [null, 0];

  const change = (values) => {
    for (const [name, value] of Object.entries({ page: "", ...values })) value ? query.set(name, value) : query.delete(name);
    remember(query);
    controls.show();
    load().catch(() => {}); // the next poll tells
  };
  const choose = (order) => change(order === (query.get("sort") ?? "submitted")
    ? { ascending: query.has("ascending") ? "" : "true" }
    : { sort: order === "submitted" ? "" : order, ascending: "" });
  const pick = (id, on) => {
    on ? picked.add(id) : picked.delete(id);
    showPicked(comparison, () => (picked.clear(), draw()));
  };
  const controls = new Controls(query, change);
  const table = new Table("Jobs", columns(pick, (tag) => change({ tag }), differences), choose);

  const draw = () => {
    showPicked(comparison, () => (picked.clear(), draw()));
    if (!answer) return;
    say(total, answer.total === 1 ? "1 job" : `${count(answer.total)} jobs`);
    table.ordered(query.get("sort") ?? "submitted", query.has("ascending"));
    list.hidden = false;
    if (answer.jobs.length) table.show(answer.jobs);
    if (!list.firstChild || (answer.jobs.length > 0) !== list.contains(table.element)) {
      put(list, answer.jobs.length ? table.element : query.size ? none() : empty());
    }
    pageLinks(pages, page(query), answer.total, (number) => change({ page: number > 1 ? String(number) : "" }));
  };
  const load = async () => {
    const own = ++latest;
    const found = await read(`/jobs?${wanted(query)}`, { signal });
    if (own !== latest) return; // a later question was asked meanwhile
    answer = found;
    tell(answer.jobs, states);
    differences.of(answer.jobs.map(({ id }) => id));
    draw();
  };

  put(place,
    h("div", { class: "title" },
      h("div", {}, h("h1", { tabindex: "-1" }, "Jobs"), total),
      h("a", { class: "button main", href: "#/submit" }, "Submit a job")),
    controls.element, comparison, list, pages);
  poll(signal, 2, load).catch((error) => say(total, `The jobs cannot be read: ${error.message}`));
}

const page = (query) => Math.max(1, Number.parseInt(query.get("page"), 10) || 1);

/** The query of the API: the address's, with a page as limit and offset. */
function wanted(query) {
  const own = new URLSearchParams(query);
  own.delete("page");
  own.set("limit", PAGE);
  own.set("offset", (page(query) - 1) * PAGE);
  return own;
}

/** Search, state, order and tag above the table. */
class Controls {
  constructor(query, change) {
    this.query = query;
    let timer;
    const later = () => (clearTimeout(timer), (timer = setTimeout(() => change({ search: this.search.value.trim() }), 250)));
    this.search = h("input", { type: "search", id: "search", autocomplete: "off", spellcheck: "false", placeholder: "id, tag, note, model, data", oninput: later });
    this.state = h("select", { id: "state", onchange: () => change({ state: this.state.value }) },
      h("option", { value: "" }, "all"), STATES.map((state) => h("option", { value: state }, state)));
    this.order = h("select", { id: "order", onchange: () => change({ sort: this.order.value === "submitted" ? "" : this.order.value, ascending: "" }) },
      Object.entries(ORDERS).map(([value, label]) => h("option", { value }, label)));
    this.direction = h("button", { type: "button", class: "small", onclick: () => change({ ascending: query.has("ascending") ? "" : "true" }) });
    this.tag = h("button", { type: "button", class: "tag", onclick: () => change({ tag: "" }) });
    this.element = h("div", { class: "tools runs-tools", role: "search" },
      h("label", { class: "choice" }, "Search", this.search), h("label", { class: "choice" }, "State", this.state),
      h("label", { class: "choice" }, "Order", this.order), this.direction, this.tag);
    this.show();
  }

  /** Shows what the address says; the text that somebody types in stays. */
  show() {
    if (document.activeElement !== this.search) this.search.value = this.query.get("search") ?? "";
    this.state.value = this.query.get("state") ?? "";
    this.order.value = this.query.get("sort") ?? "submitted";
    say(this.direction, this.query.has("ascending") ? "Least first" : "Most first");
    this.tag.hidden = !this.query.get("tag");
    say(this.tag, `tag ${this.query.get("tag")} ×`);
    this.tag.ariaLabel = `Show jobs without the tag ${this.query.get("tag")}, too`;
  }
}

/** The settings in which the jobs of the page differ, read when the page has other jobs. */
class Differences {
  #key = "";
  #told = new Map();

  constructor(signal, changed) {
    Object.assign(this, { signal, changed });
  }

  async of(ids) {
    const key = [...ids].sort().join(" ");
    if (key === this.#key) return;
    this.#key = key;
    if (ids.length < 2) return void (this.#told = new Map());
    try {
      const { runs, differences } = await read(`/jobs/compare?${ids.map((id) => `job=${id}`).join("&")}`, { signal: this.signal });
      if (key !== this.#key) return;
      const ordered = differences.toSorted((a, b) => rank(a.path) - rank(b.path));
      this.#told = new Map(runs.map(({ id }, i) => [id, ordered.map(({ path, values }) => [path, values[i]]).filter(([, value]) => value !== null)]));
      this.changed();
    } catch {
      this.#key = ""; // a job was deleted meanwhile, or the gateway is away: the next page of jobs asks again
    }
  }

  get(id) {
    return this.#told.get(id) ?? [];
  }
}

const SHOWN_DIFFERENCES = 4;

/** What a person sets comes before what a preset sets. */
const rank = (path) => (path === "algorithm.preset" ? 0 : path.startsWith("algorithm.") ? 2 : 1);

const columns = (pick, byTag, differences) => [
  { label: "Compare", cell: (job) => h("input", { type: "checkbox", "aria-label": `Compare ${job.id}`, checked: picked.has(job.id),
    onchange: ({ target }) => pick(job.id, target.checked) }) },
  { label: "Job", head: true, order: "name", cell: (job) => [
    h("a", { href: `#/jobs/${job.id}` }, job.name), h("code", { class: "id" }, job.id),
    job.tags.map((tag) => h("button", { type: "button", class: "tag", "aria-label": `Jobs with the tag ${tag}`, onclick: () => byTag(tag) }, tag)),
    job.notes ? h("span", { class: "cause" }, job.notes) : null] },
  { label: "State", order: "state", cell: (job) => h("div", {}, badge(job), job.cause ? h("span", { class: "cause" }, job.cause) : null) },
  { label: "Progress", order: "step", cell: (job) => h("div", { class: "progress" }, bar(job),
    h("span", {}, `${count(job.step)} / ${count(job.steps)}${job.started_at ? ` · ${duration(elapsed(job))}` : ""}`)) },
  { label: "Reward", number: true, order: "reward", cell: (job) => figure(job.reward ?? NaN) },
  { label: "Held-out", number: true, order: "best_score", cell: (job) => score(job.best_score, job.best_score_se) },
  { label: "Model and data", order: "model", cell: (job) => h("div", { class: "sources" }, h("span", {}, job.model || "–"), h("small", {}, job.data)) },
  { label: "Differs in", cell: (job) => told(differences.get(job.id)) },
  { label: "Submitted", order: "submitted", cell: (job) => h("time", { title: moment(job.created_at) }, ago(job.created_at)) },
];

function told(differences) {
  if (!differences.length) return "–";
  const one = ([path, value]) => h("code", { title: path }, `${path.split(".").pop()} ${typeof value === "string" ? value : JSON.stringify(value)}`);
  const more = differences.length - SHOWN_DIFFERENCES;
  return h("div", { class: "differs" }, differences.slice(0, SHOWN_DIFFERENCES).map(one), more > 0 ? h("small", {}, `and ${more} more`) : null);
}

/** Tells of states that have changed. */
function tell(jobs, states) {
  for (const job of jobs) {
    const before = states.get(job.id);
    if (before && before !== job.state) announce(`${job.name} is ${job.state}`);
    states.set(job.id, job.state);
  }
}

/** What can be done with the jobs that are picked. */
function showPicked(place, clear) {
  const key = [...picked].join(",");
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  if (picked.size === 0) return void put(place);
  const fits = picked.size >= 2 && picked.size <= MOST_COMPARED;
  put(place,
    fits ? h("a", { class: "button main", href: `#/compare/${key}` }, `Compare ${picked.size} runs`)
      : h("p", { class: "help" }, picked.size < 2 ? "Pick another one to compare." : `At most ${MOST_COMPARED} are compared at once.`),
    h("button", { type: "button", onclick: clear }, "Clear"));
}

const none = () => h("div", { class: "empty" }, h("p", {}, "No job is like that."), h("p", {}, h("a", { href: "#/jobs" }, "All jobs")));

const empty = () =>
  h("div", { class: "empty" },
    h("p", {}, "No jobs yet."),
    h("p", {}, h("a", { href: "#/submit" }, "Submit one here"), ", or with ", h("code", {}, "millrace submit FILE"), "."));

function pageLinks(place, number, total, go) {
  const link = (to, label) => h("button", { type: "button", class: "link", onclick: () => go(to) }, label);
  const links = [number > 1 ? link(number - 1, "Previous page") : null, number * PAGE < total ? link(number + 1, "Next page") : null];
  if (place.dataset.key !== `${number}/${Math.ceil(total / PAGE)}`) put(place, links);
  place.dataset.key = `${number}/${Math.ceil(total / PAGE)}`;
}
