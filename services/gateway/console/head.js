// A job's head: name, state, progress, key facts, and what can be done.

import { act, jobPath, remove } from "./api.js";
import { confirm } from "./confirm.js";
import { announce, h, put, say } from "./dom.js";
import { count, duration, moment } from "./format.js";
import { Labels } from "./labels.js";
import { actions, badge, bar, elapsed, ended } from "./state.js";

/** The element and how it follows the record. */
export class JobHead {
  constructor(id, signal) {
    this.id = id;
    this.signal = signal;
    this.refresh = async () => {};
    this.state = h("span", { class: "state" });
    this.buttons = h("div", { class: "actions" });
    this.problem = h("p", { class: "problem", role: "alert" });
    this.cause = h("p", { class: "notice", hidden: true });
    this.progress = h("div", { class: "progress wide" });
    this.facts = h("dl", { class: "facts" });
    this.labels = new Labels(signal, (job) => this.show(job));
    this.chat = h("a", { class: "button", hidden: true }, "Chat");
    this.element = h("header", { class: "job-head" },
      h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "All jobs")),
      h("div", { class: "title" }, h("div", { class: "named" }, h("h1", { tabindex: "-1" }, id), this.state), h("div", { class: "actions" }, this.chat, this.buttons)),
      this.problem, this.cause, this.progress, this.facts, this.labels.element);
  }

  /** Shows the record as it now is. */
  show(job) {
    put(this.state, badge(job));
    this.cause.hidden = !job.cause;
    this.cause.className = `notice ${job.state}`;
    say(this.cause, job.cause);
    put(this.progress, bar(job), h("span", {}, told(job)));
    put(this.facts, facts(job).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.labels.show(job);
    this.chat.hidden = !["running", "stalled", "paused"].includes(job.state) && !(ended(job) && job.export);
    this.chat.href = `#/chat/${encodeURIComponent(job.id)}`;
    this.#offer(job);
  }

  /** Draws the buttons anew only when they are others, so that the keyboard's place is kept. */
  #offer(job) {
    const offered = actions(job);
    const verbs = offered.map(({ verb }) => verb).join(" ");
    if (verbs === this.offered) return;
    this.offered = verbs;
    const held = this.buttons.contains(document.activeElement);
    put(this.buttons, offered.map((action) =>
      h("button", { type: "button", class: action.danger ? "danger" : null, onclick: () => this.#do(job, action) }, action.label)));
    if (held) (this.buttons.querySelector("button") ?? this.element.querySelector("h1")).focus();
  }

  async #do(job, { verb }) {
    if (this.busy || (QUESTIONS[verb] && !(await confirm(this.signal, QUESTIONS[verb](job))))) return;
    say(this.problem, "");
    this.busy = true; // not disabled: that would take the keyboard's place away
    try {
      if (verb === "delete") {
        await remove(jobPath(this.id), { signal: this.signal });
        announce(`${job.name} is deleted`);
        location.hash = "#/jobs";
        return;
      }
      this.show(await act(jobPath(this.id, `/${verb}`), { signal: this.signal }));
      announce(`${verb} requested for ${job.name}`);
      await this.refresh();
    } catch (error) {
      if (!this.signal.aborted) say(this.problem, error.status ? `Not done: ${error.message}.` : "The gateway does not answer.");
    }
    this.busy = false;
  }
}

const QUESTIONS = {
  cancel: (job) => ({
    title: `Cancel ${job.name}?`,
    text: `${job.id} is at step ${job.step} of ${job.steps}. It cannot be continued afterwards. Checkpoints that it has written stay.`,
    yes: "Cancel the job",
    no: "Keep it running",
  }),
  delete: (job) => ({
    title: `Delete ${job.name}?`,
    text: `The folder of ${job.id} is removed: its history, its journal, its checkpoints and exported weights. Nothing brings them back.`,
    yes: "Delete the job",
    no: "Keep it",
  }),
};

function told(job) {
  const done = `step ${count(job.step)} of ${count(job.steps)}`;
  if (job.state !== "running" || job.step < 2) return done;
  return `${done}, about ${duration((elapsed(job) / job.step) * (job.steps - job.step))} left`;
}

const facts = (job) => [
  ["Model", job.spec.model.path],
  ["Tasks", job.spec.data.train.source],
  ["Policy version", `v${job.policy_version}`],
  ["Lineage", job.lineage],
  [ended(job) ? "Ran for" : "Running for", job.started_at ? duration(elapsed(job)) : "not started"],
  ["Submitted", moment(job.created_at)],
  ["Learner", job.learner ?? "none yet"],
  ...(job.failure ? [["Newest failure", job.failure]] : []),
];
