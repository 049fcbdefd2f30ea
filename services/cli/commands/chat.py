"""Command `millrace chat JOB`: a conversation with a job's policy. It prints each answer as it arrives, with the policy version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home, JobId, Url
from services.cli.connect import open_client
from services.cli.views.terminal import print_json, say
from services.common.errors import MillraceError

if TYPE_CHECKING:
    from millrace.gateway import GatewayClient

LEAVE = frozenset({"/quit", "/exit"})
AGAIN = "/new"
HELP = f"{AGAIN} begins anew, /quit or Ctrl-D ends, Ctrl-C stops an answer"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the policy."""

    text: str
    finish_reason: str | None
    """None when the answer was stopped."""
    policy_version: dict[str, int] | None
    """Oldest and newest version that sampled it."""

    @property
    def source(self) -> str:
        """`policy version 17`, or `policy versions 17 to 18`."""
        if self.policy_version is None:
            return "stopped"
        low, high = self.policy_version["min"], self.policy_version["max"]
        versions = f"version {high}" if low == high else f"versions {low} to {high}"
        return f"policy {versions}{', cut off by --max-tokens' if self.finish_reason == 'length' else ''}"


def chat(
    job: JobId,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Say this, print the answer, and end.", show_default=False)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, tokens.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the likeliest token each time.")] = 1.0,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Talk to the policy of a running job, or of one that has ended (its exported checkpoint)."""
    if as_json and message is None:
        raise typer.BadParameter("needs --message", param_hint="--json")
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    with open_client(home, url) as client:
        settings: dict[str, Any] = {"model": client.job(job)["id"], "temperature": temperature, **limit}
        if message is None:
            _converse(client, settings)
            return
        answer = _sample(client, settings, [{"role": "user", "content": message}], echo=not as_json)
    if as_json:
        source = {"finish_reason": answer.finish_reason, "policy_version": answer.policy_version}
        print_json({"model": settings["model"], "content": answer.text, **source})
    else:
        say(f"({answer.source})")


def _converse(client: GatewayClient, settings: dict[str, Any]) -> None:
    say(f"talking to {settings['model']}; {HELP}")
    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            say("")
            return
        if line in LEAVE:
            return
        if line == AGAIN:
            messages = []
        elif line:
            messages = _take_turn(client, settings, [*messages, {"role": "user", "content": line}])


def _take_turn(client: GatewayClient, settings: dict[str, Any], messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation with the answer to its last line; without that line where it got none."""
    try:
        answer = _sample(client, settings, messages, echo=True)
    except MillraceError as error:
        say(f"millrace: {error}")
        return messages[:-1]
    say(f"({answer.source})")
    return [*messages, {"role": "assistant", "content": answer.text}]


def _sample(client: GatewayClient, settings: dict[str, Any], messages: list[dict[str, str]], *, echo: bool) -> Answer:
    """One answer, printed as it arrives where `echo`; Ctrl-C stops it."""
    from millrace.chat import ChatAnswer

    answer = ChatAnswer(client.chat(settings | {"messages": messages}))
    try:
        with answer:
            for piece in answer:
                if echo:
                    print(piece, end="", flush=True)
    except KeyboardInterrupt:
        return Answer(answer.text, None, None)
    finally:
        if echo and answer.text:
            print(flush=True)
    return Answer(answer.text, answer.finish_reason, answer.policy_version)
