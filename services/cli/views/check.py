"""Text output about what a job's first tasks meet: prompts, lengths, and references as verifiers judge them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape

from services.common.jobs.step_record import number

if TYPE_CHECKING:
    from rich.console import Console

    from millrace.records import JsonObject

MOST_CHARS = 4000
"""Of a prompt or a reference that is shown."""


def all_right(check: JsonObject) -> bool:
    """Whether no reference is wrong, unless a response of one's own is right in its place."""
    return all(is_right(each) for section in check["sections"].values() for each in section["references"])


def is_right(reference: JsonObject) -> bool:
    """Whether the reference is right in a form, or is no response, or the response of one's own is right."""
    response = reference.get("response") or {}
    return reference["right"] is not False or response.get("accuracy") == 1.0


def print_check(console: Console, check: JsonObject) -> None:
    """A dry run: each section's prompts, lengths and references, then what was not tried."""
    for name, section in check["sections"].items():
        console.print(f"[bold]data.{escape(name)}[/bold]  {_lengths(section)}", soft_wrap=True)
        for field, text in _troubles(section):
            console.print(f"  {field}: {escape(text)}", style="yellow", soft_wrap=True)
        for prompt in section["prompts"]:
            console.print(f"  [bold]task {prompt['index']}[/bold], {prompt['tokens']} tokens", soft_wrap=True)
            console.print(_indented(prompt["text"]), style="cyan", markup=False, soft_wrap=True)
        print_references(console, section["references"])
    for field in check["unchecked"]:
        console.print(f"{escape(field)} could not be checked in time: the learner checks it", style="yellow")
    for note in check["notes"]:
        console.print(escape(note), style="yellow", soft_wrap=True)
    if not check["notes"] and all_right(check):
        console.print("the job would be accepted", style="green")


def print_references(console: Console, references: Iterable[JsonObject]) -> None:
    """A line for each reference, and one for the response of one's own."""
    for each in references:
        about = f"task {each['index']}: {each['verifier']} judges {_short(each['ground_truth'])!r}"
        if each["right"]:
            console.print(
                f"  {escape(about)} right: {escape(', '.join(each['accepted']))}", style="green", soft_wrap=True
            )
        elif each["right"] is None:
            console.print(f"  {escape(about)} no response: it is the tests of a program", soft_wrap=True)
        else:
            reason = f"in no usual form right: {each['detail']}"
            console.print(f"  {escape(about)} {escape(reason)}", style="red", soft_wrap=True)
        if (verdict := each.get("response")) is not None:
            judged = f"reward {number(verdict['reward'], '.4g')}, accuracy {number(verdict['accuracy'], '.3g')}"
            console.print(
                f"    your response: {verdict['status']}, {judged}: {escape(verdict['detail'])}", soft_wrap=True
            )


def _lengths(section: JsonObject) -> str:
    counted = "" if section["counted"] == section["tasks"] else f" of the first {section['counted']:,}"
    return (
        f"{section['tasks']:,} tasks; prompts{counted} have {section['shortest']} to {section['longest']} tokens "
        f"(median {section['median']}), and the context has room for {section['room']}"
    )


def _troubles(section: JsonObject) -> Iterable[tuple[str, str]]:
    if section["too_long"]:
        fate = (
            "they are left out"
            if section["filtered"]
            else "their groups fail (data.filter_overlong_prompts leaves them out)"
        )
        yield "too long", f"{section['too_long']:,} prompts have more tokens than there is room for: {fate}"
    if section["refused"]:
        yield "refused", f"{section['refused']:,} prompts: {section['refusal']}"


def _indented(text: str) -> str:
    return "\n".join(f"  │ {line}" for line in _short(text, MOST_CHARS).split("\n"))


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
