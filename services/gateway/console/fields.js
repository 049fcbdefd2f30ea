// A form of the main settings, made from the job spec's JSON schema: labels, help, defaults and choices are the schema's own.

import { h, prose, put, say } from "./dom.js";

const MAIN = [
  ["Job", ["name", "model.path", "model.dtype"]],
  ["Data", ["data.train.source", "data.train.size", "data.eval.source"]],
  ["Sampling", ["rollout.group_size", "rollout.rollout_max_tokens", "rollout.temperature"]],
  ["Learning", ["learner.steps", "learner.lr", "algorithm.preset", "algorithm.loss",
    "algorithm.filter_groups_train_batch_size", "off_policy.max_off_policy_steps"]],
  ["Evaluation", ["eval.enabled", "eval.interval_steps", "eval.tasks"]],
];

/** The form; `changed(path, value)` is called with undefined for a setting that was emptied. */
export class Fields {
  #controls = new Map();

  constructor(schema, changed) {
    this.element = h("div", { class: "fields" }, MAIN.map(([title, paths]) =>
      h("fieldset", {}, h("legend", {}, title), paths.map((path) => this.#field(schema, path, changed)))));
  }

  /** Shows the settings of a document; null: the text is no JSON, so the form rests. */
  show(document) {
    for (const [path, { input }] of this.#controls) {
      input.disabled = document === null;
      if (document === null || input === window.document.activeElement) continue;
      const value = path.split(".").reduce((at, key) => at?.[key], document);
      if (input.type === "checkbox") input.checked = value ?? false;
      else setValue(input, value === undefined || value === null ? "" : typeof value === "object" ? JSON.stringify(value) : value);
    }
  }

  /** Shows each problem beside its field; gives back which of them have one. */
  explain(problems) {
    for (const [path, { input, problem }] of this.#controls) {
      const mine = problems.filter(({ field }) => field === path);
      input.setAttribute("aria-invalid", mine.length > 0);
      say(problem, mine.map(({ message }) => message).join("; "));
    }
    return new Set([...this.#controls.keys()].filter((path) => problems.some(({ field }) => field === path)));
  }

  focus(path) {
    this.#controls.get(path)?.input.focus();
  }

  #field(root, path, changed) {
    const schema = find(root, path);
    const id = `field-${path.replaceAll(".", "-")}`;
    const input = control(schema, id);
    const problem = h("p", { class: "problem", id: `${id}-problem` });
    const kind = input.type === "checkbox" || input.tagName === "SELECT" ? "change" : "input";
    input.addEventListener(kind, () => changed(path, valueOf(input, schema)));
    this.#controls.set(path, { input, problem });
    const help = h("p", { class: "help", id: `${id}-help` }, prose(schema.description ?? ""));
    return h("div", { class: input.type === "checkbox" ? "field tick" : "field" },
      h("label", { for: id }, path), put(h("div", {}), input), help, problem);
  }
}

function control(schema, id) {
  const described = { id, "aria-describedby": `${id}-help ${id}-problem` };
  if (schema.type === "boolean") return h("input", { ...described, type: "checkbox" });
  const standard = schema.default === undefined || schema.default === null ? "" : String(schema.default);
  if (schema.enum) {
    const others = schema.enum.filter((word) => word !== standard);
    return h("select", described, h("option", { value: "" }, `${standard || "none"} (default)`),
      others.map((word) => h("option", { value: word }, word)));
  }
  const numeric = schema.type === "integer" || schema.type === "number";
  return h("input", {
    ...described, type: "text", inputmode: numeric ? "decimal" : "text", autocomplete: "off", spellcheck: "false",
    placeholder: standard || (schema.examples?.[0] ?? "not set"),
  });
}

/** Sets the value; a choice that the schema does not list (an installed function's name, say) is added. */
function setValue(input, value) {
  if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === String(value))) {
    input.append(h("option", { value }, value));
  }
  input.value = value;
}

/** The value as it goes into the document; what is not a number stays text, so that the API can say so beside the field. */
function valueOf(input, { type }) {
  if (input.type === "checkbox") return input.checked;
  const text = input.value.trim();
  if (!text) return undefined;
  return type === "integer" || type === "number" ? (Number.isFinite(Number(text)) ? Number(text) : text) : text;
}

/** The schema of a dotted path, references resolved; of several types the first that is not null: before a free name, the choices. */
function find(root, path) {
  const resolve = (schema) => {
    const { $ref, anyOf, ...own } = schema;
    if ($ref) return { ...resolve(root.$defs[$ref.split("/").pop()]), ...own };
    if (anyOf) return { ...resolve(anyOf.find(({ type }) => type !== "null")), ...own };
    return schema;
  };
  return path.split(".").reduce((schema, key) => resolve(schema.properties[key]), root);
}
