// Tables that stay tables for screen readers where a narrow screen lays each row out as a card.

import { h, put } from "./dom.js";

/** A table: `columns` are `{label, cell: row → content, number?, head?}`; `caption` is read out, not shown. */
export class Table {
  constructor(caption, columns) {
    this.columns = columns;
    this.body = h("tbody", { role: "rowgroup" });
    const heads = columns.map(({ label, number }) =>
      h("th", { scope: "col", role: "columnheader", class: number ? "number" : null }, label));
    this.element = h("table", { role: "table" },
      h("caption", { class: "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
      this.body);
  }

  /** Shows these rows in the place of the ones before; the keyboard stays on the link that it was on. */
  show(rows) {
    const links = () => [...this.body.querySelectorAll("a")];
    const place = links().indexOf(document.activeElement);
    const held = document.activeElement.hash;
    put(this.body, rows.map((row) => h("tr", { role: "row" }, this.columns.map((column) => cell(column, row)))));
    if (place < 0) return;
    const same = links()[place];
    (same?.hash === held ? same : links().find((link) => link.hash === held))?.focus();
  }
}

const cell = ({ label, cell: content, number, head }, row) =>
  head
    ? h("th", { scope: "row", role: "rowheader", "data-label": label }, content(row))
    : h("td", { role: "cell", "data-label": label, class: number ? "number" : null }, content(row));
