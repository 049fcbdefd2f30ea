// Tables that stay tables for screen readers where a narrow screen lays each row out as a card.

import { h, put } from "./dom.js";

/**
 * A table: `columns` are `{label, cell: row → content, number?, head?, order?}`; `caption` is read out, not shown.
 * `choose(order)` is called when the head of a column with an order is pressed.
 */
export class Table {
  constructor(caption, columns, choose = null) {
    this.columns = columns;
    this.body = h("tbody", { role: "rowgroup" });
    const heads = this.heads = columns.map(({ label, number, order }) =>
      h("th", { scope: "col", role: "columnheader", class: number ? "number" : null },
        order ? h("button", { type: "button", class: "order", onclick: () => choose(order) }, label) : label));
    this.element = h("table", { role: "table" },
      h("caption", { class: "unseen" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
      this.body);
  }

  /** Shows these rows in the place of the ones before; the keyboard stays on the link or control that it was on. */
  show(rows) {
    const controls = () => [...this.body.querySelectorAll("a, input, button")];
    const place = controls().indexOf(document.activeElement);
    const held = place < 0 ? null : meaning(document.activeElement);
    put(this.body, rows.map((row) => h("tr", { role: "row" }, this.columns.map((column) => cell(column, row)))));
    if (place < 0) return;
    const same = controls()[place];
    (same && meaning(same) === held ? same : controls().find((control) => meaning(control) === held))?.focus();
  }

  /** Shows by what the rows are ordered. */
  ordered(order, ascending) {
    this.columns.forEach((column, i) => {
      if (column.order && column.order === order) this.heads[i].setAttribute("aria-sort", ascending ? "ascending" : "descending");
      else this.heads[i].removeAttribute("aria-sort");
    });
  }
}

const meaning = (control) => control.hash ?? control.ariaLabel ?? control.textContent;

const cell = ({ label, cell: content, number, head }, row) =>
  head
    ? h("th", { scope: "row", role: "rowheader", "data-label": label }, content(row))
    : h("td", { role: "cell", "data-label": label, class: number ? "number" : null }, content(row));
