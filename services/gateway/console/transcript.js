// An episode's turns as a transcript: what the environment said and what the policy replied, each under the name of who speaks.

import { h } from "./dom.js";
import { count, figure } from "./format.js";

const EDGE = 3; // turns shown at each end of a long episode; those between them are folded

/** The transcript of an episode, whose prompt stands elsewhere. */
export function transcript(turns) {
  const shown = turns.map(turnItem);
  const between = shown.slice(EDGE, -EDGE);
  const items = between.length > 1 ? [shown.slice(0, EDGE), folded(between), shown.slice(-EDGE)] : shown;
  const missing = turns[0].turn - 1;
  return h("div", { class: "transcript" },
    missing > 0 ? h("p", { class: "about" }, `the first ${count(missing)} turns were not kept`) : null,
    h("ol", { class: "turns" }, items));
}

const folded = (items) =>
  h("li", {}, h("details", {}, h("summary", {}, `${count(items.length)} turns between`), h("ol", { class: "turns" }, items)));

function turnItem(turn) {
  const told = [`Turn ${turn.turn}`, turn.reward !== null ? `reward ${figure(turn.reward)}` : null,
    turn.finish_reason === "length" ? "cut off" : null, `${count(turn.sampled)} tokens`];
  const said = turn.turn > 1 ? turn.said : []; // the first turn answers the prompt
  return h("li", {},
    h("p", { class: "about" }, told.filter(Boolean).join(" · ")),
    said.map(({ role, content }) => words("observed", `Environment (${role})`, content)),
    words("reply", "Policy", turn.text));
}

const words = (kind, who, text) => h("div", { class: kind }, h("p", { class: "who" }, who), h("pre", { class: "text" }, text || "(empty)"));
