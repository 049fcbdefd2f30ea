// The API's description, drawn from /openapi.json.

import { read } from "./api.js";
import { h, prose, put } from "./dom.js";
import { Table } from "./table.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const LIMITS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "characters ≥", maxLength: "characters ≤",
  minItems: "items ≥", maxItems: "items ≤", pattern: "pattern", const: "is",
};

const main = document.getElementById("main");

/** The whole page: operations by tag, then schemas. */
function show({ info, paths, components }) {
  const operations = Object.entries(paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({ method, path, ...item[method] })));
  const tags = [...new Set(operations.map(({ tags: [tag] = ["other"] }) => tag))];
  const of = (tag) => operations.filter(({ tags: [first] = ["other"] }) => first === tag);
  put(main,
    h("div", { class: "title" }, h("h1", { tabindex: "-1" }, info.title, " ", h("small", {}, info.version))),
    h("p", {}, info.summary, " Every path but the health checks wants ", h("code", {}, "Authorization: Bearer TOKEN"), "."),
    tags.map((tag) => h("section", {}, h("h2", {}, tag), of(tag).map(operation))),
    h("section", {}, h("h2", {}, "Schemas"), Object.entries(components.schemas).map(schema)));
  window.addEventListener("hashchange", reveal);
  reveal();
}

/** Opens what the address names. */
function reveal() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (named instanceof HTMLDetailsElement) named.open = true;
  named?.scrollIntoView();
}

const operation = ({ method, path, operationId, summary, description, parameters = [], requestBody, responses }) =>
  h("details", { class: "panel", id: operationId },
    h("summary", {}, h("span", { class: `method method-${method}` }, method.toUpperCase()), h("code", {}, path), h("span", {}, summary)),
    h("div", {},
      description ? h("p", {}, prose(description)) : null,
      parameters.length ? part("Parameters", table("Parameters", PARAMETERS, parameters)) : null,
      requestBody ? part("Body", body(requestBody)) : null,
      part("Answers", table("Answers", ANSWERS, Object.entries(responses)))));

const part = (title, ...content) => h("div", {}, h("h3", {}, title), content);

function table(caption, columns, rows) {
  const made = new Table(caption, columns);
  made.show(rows);
  return made.element;
}

const PARAMETERS = [
  { label: "Name", head: true, cell: ({ name, in: place, required }) => [h("code", {}, name), " ", h("small", {}, required ? `${place}, required` : place)] },
  { label: "Type", cell: (parameter) => kind(parameter.schema) },
  { label: "Description", cell: ({ description = "" }) => prose(description) },
];

const ANSWERS = [
  { label: "Status", head: true, cell: ([status]) => status },
  { label: "Body", cell: ([, { content = {} }]) => Object.entries(content).map(([type, { schema: of = {} }]) => h("div", {}, h("code", {}, type), " ", kind(of))) },
  { label: "Description", cell: ([, { description = "" }]) => prose(description) },
];

const FIELDS = [
  { label: "Field", head: true, cell: ({ name, required }) => [h("code", {}, name), required ? h("small", {}, " required") : null] },
  { label: "Type", cell: (field) => kind(field.schema) },
  { label: "Description", cell: ({ schema: { description = "" } }) => prose(description) },
];

const body = ({ description = "", content }) => [
  description ? h("p", {}, prose(description)) : null,
  Object.entries(content).map(([type, { schema: of }]) => h("p", {}, h("code", {}, type), " ", kind(of))),
  Object.values(Object.values(content)[0].examples ?? {}).map(({ value }) => h("pre", {}, JSON.stringify(value, null, 2))),
];

const schema = ([name, { description = "", properties = {}, required = [], ...rest }]) =>
  h("details", { class: "panel", id: `schema-${name}` },
    h("summary", {}, h("code", {}, name)),
    h("div", {},
      description ? h("p", {}, prose(description)) : null,
      Object.keys(properties).length
        ? table(name, FIELDS, Object.entries(properties).map(([field, of]) => ({ name: field, schema: of, required: required.includes(field) })))
        : h("p", {}, kind(rest))));

/** A schema in a line: names of schemas are links. */
function kind(of) {
  return h("span", { class: "kind" }, typed(of), limits(of), "default" in of ? `; default ${JSON.stringify(of.default)}` : null);
}

function typed(of) {
  if (of.$ref) return link(of.$ref.split("/").at(-1));
  const choices = of.anyOf ?? of.oneOf ?? of.allOf;
  if (choices) return choices.map((choice, index) => [index ? " or " : null, typed(choice), limits(choice)]);
  if (of.enum) return of.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (of.type === "array") return ["list of ", typed(of.items ?? {})];
  if (of.additionalProperties && typeof of.additionalProperties === "object") return ["map to ", typed(of.additionalProperties)];
  return of.type ?? "any value";
}

const link = (name) => h("a", { href: `#schema-${name}` }, name);

const limits = (of) =>
  Object.entries(LIMITS).filter(([name]) => name in of).map(([name, words]) => `, ${words} ${of[name]}`);

try {
  show(await read("/openapi.json"));
} catch (error) {
  const told = error.status === 401 ? "Sign in at the console in this tab first: the description needs the gateway’s token." : error.message;
  put(main, h("h1", {}, "API"), h("p", { class: "problem", role: "alert" }, told, " ", h("a", { href: "/console/" }, "Console")));
}
