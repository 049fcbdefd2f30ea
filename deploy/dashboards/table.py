"""docs/dashboards.md: what each panel and each rule asked of a live run, and what came back."""

from __future__ import annotations

from pathlib import Path

from deploy.dashboards.survey import Answer, panels, rules

PAGE = Path(__file__).parents[2] / "docs" / "dashboards.md"
START, END = "<!-- written by python -m deploy.dashboards.record: begin -->", "<!-- end -->"


def write_page(answers: list[Answer], run: str, promtool: str) -> None:
    """Puts the tables into the page, between its marks. `run`: what was run, a sentence; `promtool`: what it printed."""
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{_tables(answers, run, promtool)}\n{END}{after}")


def _tables(answers: list[Answer], run: str, promtool: str) -> str:
    names = {rule.name for rule in rules()}
    lines = [run, ""]
    for dashboard in sorted({panel.dashboard for panel in panels()}):
        mine = [answer for answer in answers if answer.asked_by.startswith(f"{dashboard}: ")]
        lines += [f"### {dashboard.capitalize()}", "", f"![{dashboard}](images/dashboard-{dashboard}.png)", ""]
        lines += ["| panel | query | series |", "|---|---|---|", *(_row(answer) for answer in mine), ""]
    lines += ["### Alert rules, without their comparisons", "", "| rule | condition | series |", "|---|---|---|"]
    lines += [_row(answer) for answer in answers if answer.asked_by in names]
    return "\n".join([*lines, "", "### promtool", "", "```", promtool.strip(), "```"])


def _row(answer: Answer) -> str:
    expr = answer.expr.replace("|", "\\|")
    return f"| {answer.asked_by.partition(': ')[2] or answer.asked_by} | `{expr}` | {answer.with_data} |"
