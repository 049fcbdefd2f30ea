// The newest judged groups: each group's rollouts with their verdicts side by side.

import { jobPath, read } from "./api.js";
import { h, put, say } from "./dom.js";
import { ago, count, figure, moment, versions } from "./format.js";
import { poll } from "./poll.js";
import { transcript } from "./transcript.js";

const SIZES = [20, 60, 256];
const OUTCOMES = {
  all: () => true,
  mixed: (group) => new Set(group.rollouts.map(({ accuracy }) => accuracy)).size > 1,
  right: (group) => group.rollouts.every(right),
  wrong: (group) => group.rollouts.every((rollout) => rollout.status === "scored" && !right(rollout)),
  unscored: (group) => group.rollouts.some(({ status }) => status !== "scored"),
};

/** How a rollout ended that did not come to its own end. */
const ENDS = { length: "cut off", context: "cut off: no room in the context", turns: "no turn left" };

const right = ({ status, accuracy }) => status === "scored" && accuracy >= 1;

/** The samples of a job, with filters; newer ones are offered, not pushed in under the reader's eyes. */
export function showSamples(place, signal, job) {
  const told = h("p", { class: "help", role: "status" }, "Loading…");
  const list = h("div", { class: "groups" });
  const newer = h("button", { type: "button", hidden: true }, "Show newer groups");
  const more = h("button", { type: "button", hidden: true }, "Show more groups");
  const purpose = choice("purpose", "Purpose", [["all", "all"], ["train", "training"], ["eval", "evaluation"]]);
  const outcome = choice("outcome", "Outcome", [
    ["all", "all"], ["mixed", "mixed verdicts"], ["right", "all right"], ["wrong", "all wrong"], ["unscored", "not scored"]]);
  let [size, groups, archived] = [0, [], false];

  const draw = () => {
    const chosen = groups.filter((group) => ["all", group.purpose].includes(purpose.input.value) && OUTCOMES[outcome.input.value](group));
    put(list, chosen.map((group) => groupCard(job, group, signal)));
    say(told, groups.length ? `${count(chosen.length)} of the newest ${count(groups.length)} groups` : (archived ? "The job ended long ago: its samples were removed." : "No group has been judged yet."));
  };
  const load = async (shown = true) => {
    const { samples, archived: gone } = await read(jobPath(job.id, `/rollouts?limit=${SIZES[size]}`), { signal });
    if (!shown && groups.length && samples[0] && key(samples[0]) !== key(groups[0])) return void (newer.hidden = false);
    if (!shown && groups.length) return;
    groups = samples;
    archived = gone;
    newer.hidden = true;
    more.hidden = samples.length < SIZES[size] || size === SIZES.length - 1;
    draw();
  };
  const now = () => load().catch((error) => signal.aborted || say(told, `The samples cannot be read: ${error.message}`));
  newer.addEventListener("click", now);
  more.addEventListener("click", () => ((size += 1), now()));
  for (const { input } of [purpose, outcome]) input.addEventListener("change", draw);

  put(place,
    h("div", { class: "title" },
      h("div", {}, h("h2", {}, "Samples"), told),
      h("div", { class: "tools" }, newer, purpose.element, outcome.element)),
    list, more);
  poll(signal, 4, () => load(false)).catch((error) => say(told, `The samples cannot be read: ${error.message}`));
}

const key = (group) => `${group.lineage}/${group.group_id}/${group.attempt}/${group.at}`;

function choice(id, label, options) {
  const input = h("select", { id }, options.map(([value, text]) => h("option", { value }, text)));
  return { input, element: h("label", { class: "choice" }, label, input) };
}

function groupCard(job, group, signal) {
  const prompt = h("dd", { class: "text" }, group.prompt);
  const rollouts = group.rollouts.map(rolloutCard);
  const judged = group.rollouts.filter(({ reward }) => reward !== null);
  const mean = judged.reduce((sum, { reward }) => sum + reward, 0) / judged.length;
  const told = [group.purpose === "eval" ? "evaluation" : "training", group.data_source,
    group.environment ? `seed ${group.environment_seed} of ${group.environment}` : null, `sampled by ${group.server}`].filter(Boolean);
  const episodes = group.rollouts.some(({ turns }) => turns?.length);
  return h("article", { class: "group panel", "aria-label": `Group ${group.group_id}` },
    h("header", {},
      h("h3", {}, `Group ${group.group_id}`),
      h("p", { class: "help" }, told.join(" · "), " · ", h("time", { title: moment(group.at) }, ago(group.at))),
      h("p", { class: "score" }, `${judged.filter(right).length} of ${group.rollouts.length} right`,
        h("small", {}, `mean reward ${figure(mean)}`)),
      rawSwitch(job, group, [prompt, ...rollouts.map((card) => card.querySelector(".transcript, pre"))], signal)),
    h("dl", { class: "task" },
      h("div", {}, h("dt", {}, "Prompt"), prompt),
      group.ground_truth || !group.environment ? h("div", {}, h("dt", {}, "Reference"), h("dd", { class: "text" }, group.ground_truth)) : null),
    h("ol", { class: episodes ? "rollouts episodes" : "rollouts" }, rollouts));
}

/** A switch between the texts and what the model sees, special tokens included; `places`: of the prompt, then of each rollout. */
function rawSwitch(job, group, places, signal) {
  const plain = places.map(({ childNodes }) => [...childNodes]);
  const button = h("button", { type: "button", class: "raw", "aria-pressed": "false" }, "Special tokens");
  const show = (contents, pressed) => {
    places.forEach((place, index) => put(place, contents[index]));
    button.setAttribute("aria-pressed", String(pressed));
  };
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-pressed") === "true") return show(plain, false);
    button.disabled = true;
    try {
      const { samples } = await read(jobPath(job.id, `/rollouts?raw=true&limit=50&group=${group.group_id}`), { signal });
      const found = samples.find((sample) => key(sample) === key(group));
      if (!found) throw new Error("the group is no longer kept");
      const texts = [found.raw_prompt, ...found.rollouts.map(({ raw }) => raw)].map((text) => text || "(empty)");
      show(places.map((place, index) => (place.localName === "div" ? h("pre", { class: "text" }, texts[index]) : texts[index])), true);
    } catch (error) {
      if (!signal.aborted) say(button, `No special tokens: ${error.fields?.[0]?.message ?? error.message}`);
    } finally {
      button.disabled = false;
    }
  });
  return button;
}

function rolloutCard(rollout) {
  const [kind, word] = verdict(rollout);
  return h("li", { class: `rollout ${kind}` },
    h("p", { class: "verdict" }, h("b", {}, word),
      h("span", {}, rollout.reward !== null ? `reward ${figure(rollout.reward)}` : "no reward")),
    rollout.turns?.length ? transcript(rollout.turns) : h("pre", { class: "text" }, rollout.text || "(empty)"),
    h("p", { class: "about" },
      [`accuracy ${figure(rollout.accuracy)}`, `${count(rollout.tokens)} tokens`,
        ENDS[rollout.finish_reason],
        versions(rollout.min_policy_version, rollout.max_policy_version)].filter(Boolean).join(" · ")),
    h("p", { class: "about" }, rollout.verifier, rollout.detail ? `: ${rollout.detail}` : ""));
}

function verdict(rollout) {
  if (rollout.status === "timeout") return [rollout.reward === null ? "unscored" : "wrong", "timeout"];
  if (rollout.status !== "scored") return ["unscored", "not judged"];
  if (right(rollout)) return ["right", "right"];
  return rollout.accuracy > 0 ? ["partly", "partly right"] : ["wrong", "wrong"];
}
