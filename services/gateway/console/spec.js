// A job's resolved spec: every setting with the value that it has.

import { h, put } from "./dom.js";

export const showSpec = (place, _signal, job) =>
  put(place,
    h("div", { class: "title" }, h("h2", {}, "Resolved spec"),
      h("a", { class: "button", href: `#/submit/${encodeURIComponent(job.id)}` }, "Submit a job like this")),
    job.export ? h("p", {}, "Newest weights, in Hugging Face format: ", h("code", { class: "path" }, job.export)) : null,
    h("pre", { class: "panel code", tabindex: "0", "aria-label": "Resolved spec" }, JSON.stringify(job.spec, null, 2)));
