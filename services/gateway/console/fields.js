// A form of a job's settings, made from the job spec's JSON schema: labels, help, defaults and choices are the schema's own.

import { h, prose, put, say } from "./dom.js";

const MAIN = [
  ["Job", ["name", "model.path", "model.dtype"]],
  ["Data", ["data.train.source", "data.train.size", "data.eval.source"]],
  ["Sampling", ["rollout.group_size", "rollout.rollout_max_tokens", "rollout.temperature"]],
  ["Reward", ["reward.verifiers.*"]],
  ["Learning", ["learner.steps", "learner.lr", "algorithm.preset", "algorithm.loss",
    "algorithm.filter_groups_train_batch_size", "off_policy.max_off_policy_steps"]],
  ["Evaluation", ["eval.enabled", "eval.interval_steps", "eval.tasks"]],
];
/** Settings of which the installation knows possible values: path → list of the catalog. */
const OFFERED = {
  "model.path": "models", "critic.path": "models", "reference.path": "models",
  "data.train.source": "data", "data.eval.source": "data", "reward.verifiers.*": "verifiers",
};

/** The form; `changed(path, value)` is called with undefined for a setting that was emptied; `catalog`: what the installation has. */
export class Fields {
  #controls = new Map();

  constructor(schema, catalog, changed) {
    const lists = ["models", "data", "verifiers"].map((kind) =>
      h("datalist", { id: `offered-${kind}` }, (catalog[kind] ?? []).map((item) => h("option", { value: item.name ?? item }))));
    const field = (path) => this.#field(schema, path, changed);
    const main = MAIN.map(([title, paths]) => h("fieldset", {}, h("legend", {}, title), paths.map(field)));
    const known = new Set(MAIN.flatMap(([, paths]) => paths));
    this.element = h("div", { class: "fields" }, lists, main, others(schema, known, field));
  }

  /** Shows the settings of a document; null: the text is no JSON, so the form rests. */
  show(document) {
    for (const [path, { input }] of this.#controls) {
      input.disabled = document === null;
      if (document === null || input === window.document.activeElement) continue;
      const value = path.split(".").reduce((at, key) => at?.[key], document);
      if (input.type === "checkbox") input.checked = value ?? input.dataset.standard === "true";
      else setValue(input, value === undefined || value === null ? "" : typeof value === "object" ? JSON.stringify(value) : value);
    }
  }

  /** Shows each problem beside its field; gives back which of them have one. */
  explain(problems) {
    for (const [path, { input, problem }] of this.#controls) {
      const mine = problems.filter(({ field }) => field === path);
      input.setAttribute("aria-invalid", mine.length > 0);
      say(problem, mine.map(({ message }) => message).join("; "));
      if (mine.length) input.closest("details")?.setAttribute("open", "");
    }
    return new Set([...this.#controls.keys()].filter((path) => problems.some(({ field }) => field === path)));
  }

  focus(path) {
    const input = this.#controls.get(path)?.input;
    input?.closest("details")?.setAttribute("open", "");
    input?.focus();
  }

  #field(root, path, changed) {
    const schema = find(root, path);
    const id = `field-${path.replaceAll(".", "-").replace("*", "all")}`;
    const input = control(schema, id, OFFERED[path]);
    const problem = h("p", { class: "problem", id: `${id}-problem` });
    const kind = input.type === "checkbox" || input.tagName === "SELECT" ? "change" : "input";
    input.addEventListener(kind, () => changed(path, valueOf(input, schema)));
    this.#controls.set(path, { input, problem });
    const help = h("p", { class: "help", id: `${id}-help` }, prose(schema.description ?? ""));
    return h("div", { class: input.type === "checkbox" ? "field tick" : "field", "data-path": path },
      h("label", { for: id }, path), put(h("div", {}), input), help, problem);
  }
}

/** All settings that are not among the main ones, by section, with a search. */
function others(schema, known, field) {
  const groups = Object.entries(leaves(schema)).map(([section, paths]) => {
    const fields = paths.filter((path) => !known.has(path)).map(field);
    return h("details", { class: "section" }, h("summary", {}, section, h("small", {}, ` ${fields.length} settings`)), h("fieldset", {}, fields));
  });
  const search = h("input", { type: "search", id: "settings-search", autocomplete: "off", spellcheck: "false", placeholder: "name or description" });
  search.addEventListener("input", () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of groups) {
      const fields = [...group.querySelectorAll(".field")];
      for (const item of fields) item.hidden = !words.every((word) => item.textContent.toLowerCase().includes(word));
      group.hidden = fields.every((item) => item.hidden);
      group.open = words.length > 0 && !group.hidden;
    }
  });
  return h("details", { class: "all" }, h("summary", {}, "All settings"),
    h("label", { class: "choice" }, "Search", search), groups);
}

/** Section → the paths of its settings, down to what is no section itself. */
function leaves(root) {
  const below = (schema, path) => Object.entries(schema.properties).flatMap(([name, part]) => {
    const own = resolve(root, part);
    return own.properties ? below(own, `${path}${name}.`) : [`${path}${name}`];
  });
  const found = {};
  for (const [name, part] of Object.entries(root.properties)) {
    const own = resolve(root, part);
    if (own.properties) found[name] = below(own, `${name}.`);
    else (found.job ??= []).push(name);
  }
  return found;
}

function control(schema, id, offered) {
  const described = { id, "aria-describedby": `${id}-help ${id}-problem` };
  if (schema.type === "boolean") return h("input", { ...described, type: "checkbox", "data-standard": String(schema.default ?? false) });
  const standard = schema.default === undefined || schema.default === null ? "" : typeof schema.default === "object" ? JSON.stringify(schema.default) : String(schema.default);
  if (schema.enum) {
    const others = schema.enum.filter((word) => word !== standard);
    return h("select", described, h("option", { value: "" }, `${standard || "none"} (default)`),
      others.map((word) => h("option", { value: word }, word)));
  }
  const numeric = schema.type === "integer" || schema.type === "number";
  const example = schema.examples?.[0];
  return h("input", {
    ...described, type: "text", inputmode: numeric ? "decimal" : "text", autocomplete: "off", spellcheck: "false",
    list: offered ? `offered-${offered}` : null,
    placeholder: standard || (example === undefined ? "not set" : typeof example === "object" ? JSON.stringify(example) : example),
  });
}

/** Sets the value; a choice that the schema does not list (an installed function's name, say) is added. */
function setValue(input, value) {
  if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === String(value))) {
    input.append(h("option", { value }, value));
  }
  input.value = value;
}

/** The value as it goes into the document; what is not of the setting's type stays text, so that the API can say so beside the field. */
function valueOf(input, { type }) {
  if (input.type === "checkbox") return input.checked;
  const text = input.value.trim();
  if (!text) return undefined;
  if (type === "integer" || type === "number") return Number.isFinite(Number(text)) ? Number(text) : text;
  if (type !== "object" && type !== "array") return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The schema with references resolved; of several types the first that is not null: before a free name, the choices. */
function resolve(root, schema) {
  const { $ref, anyOf, ...own } = schema;
  if ($ref) return { ...resolve(root, root.$defs[$ref.split("/").pop()]), ...own };
  if (anyOf) return { ...resolve(root, anyOf.find(({ type }) => type !== "null")), ...own };
  return schema;
}

/** The schema of a dotted path; `*` is any key. */
function find(root, path) {
  return path.split(".").reduce((schema, key) => {
    if (key !== "*") return resolve(root, schema.properties[key]);
    const value = resolve(root, schema.additionalProperties ?? {});
    return { ...value, default: undefined, description: `One for all rows: \`"*"\` of \`${path.slice(0, -2)}\`. Unset: chosen by the rows' \`data_source\`.` };
  }, root);
}
