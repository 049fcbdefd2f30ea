// A question that must be answered before something is done that cannot be undone.

import { h, put } from "./dom.js";

const dialog = document.getElementById("dialog");

/** Asks; true when the person chose to go on. Escape, and leaving the view, are a no. */
export function confirm(signal, { title, text, yes, no }) {
  const settle = (answer) => () => dialog.close(answer);
  put(dialog,
    h("h2", { id: "dialog-title" }, title),
    h("p", {}, text),
    h("div", { class: "actions" },
      h("button", { type: "button", onclick: settle("no"), autofocus: true }, no),
      h("button", { type: "button", class: "danger", onclick: settle("yes") }, yes)));
  dialog.returnValue = "no";
  dialog.showModal();
  signal.addEventListener("abort", settle("no"), { once: true });
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
