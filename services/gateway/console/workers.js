// Who is there: every process with a fresh heartbeat, and the policy that it holds; and who could not be kept alive, and why.

import { read } from "./api.js";
import { h, put, say } from "./dom.js";
import { ago, figure } from "./format.js";
import { poll } from "./poll.js";
import { Table } from "./table.js";

const KINDS = ["learner", "rollout", "environment", "reward"];

/** The workers, asked for every two seconds. */
export function showWorkers(place, signal) {
  const told = h("p", { class: "help" }, "Loading…");
  const panel = h("div", { class: "panel flush", hidden: true });
  const newest = new Map(); // job → its newest policy version among the workers
  const table = new Table("Workers with a fresh heartbeat", columns(newest));
  put(place, h("div", { class: "title" }, h("div", {}, h("h1", { tabindex: "-1" }, "Workers"), told)), panel);
  put(panel, table.element);
  poll(signal, 2, async () => {
    const { workers } = await read("/workers", { signal });
    newest.clear();
    for (const { job_id: job, policy_version: version } of workers) {
      if (job && version !== null) newest.set(job, Math.max(version, newest.get(job) ?? 0));
    }
    say(told, workers.length ? KINDS.map((kind) => counted(workers, kind)).join(", ") : "No worker has a fresh heartbeat.");
    panel.hidden = workers.length === 0;
    table.show(workers.sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind) || (a.name < b.name ? -1 : 1)));
  });
}

const counted = (workers, kind) => `${workers.filter((worker) => worker.kind === kind).length} ${kind}`;

const columns = (newest) => [
  { label: "Worker", head: true, cell: (worker) => [worker.name, h("code", { class: "id" }, worker.host + (worker.pid ? `, pid ${worker.pid}` : ""))] },
  { label: "Kind", cell: (worker) => worker.kind },
  { label: "State", cell: (worker) => h("span", { class: `badge worker-${worker.state}` }, worker.state) },
  { label: "Job", cell: (worker) => jobLink(worker.job_id) },
  { label: "Policy", number: true, cell: (worker) => [version(worker), behind(worker, newest)] },
  { label: "Heartbeat", number: true, cell: (worker) => ago(worker.at) },
  { label: "Detail", cell: (worker) => detail(worker.detail) },
];

const jobLink = (id) => (id ? h("a", { href: `#/jobs/${encodeURIComponent(id)}` }, id) : "–");

const version = (worker) => (worker.policy_version === null ? "–" : `v${worker.policy_version}`);

function behind(worker, newest) {
  const steps = worker.policy_version === null ? 0 : (newest.get(worker.job_id) ?? 0) - worker.policy_version;
  return steps > 0 ? h("small", { class: "behind" }, ` ${steps} behind`) : null;
}

const detail = (pairs) =>
  Object.entries(pairs).map(([name, value]) =>
    h("span", { class: "pair" }, name.replaceAll("_", " "), " ", h("b", {}, typeof value === "number" ? figure(value) : value)));
