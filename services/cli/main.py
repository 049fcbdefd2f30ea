"""Entry point of the command `millrace`. Commands import heavy modules in their functions, so that `--help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from services.cli.commands import (
    chat,
    config,
    data,
    dead_letters,
    jobs,
    machine,
    models,
    plan,
    proof,
    retention,
    runs,
    stack,
    verify,
    weights,
)
from services.common.errors import MillraceError

COMMANDS = (
    stack.up, stack.down,
    jobs.submit, jobs.resubmit, jobs.schema, jobs.follow, jobs.label, jobs.jobs, jobs.show,
    jobs.rollouts, jobs.pause, jobs.resume, jobs.cancel,
    retention.delete, retention.prune,
    runs.metrics, runs.compare, verify.verify,
    proof.ledger, proof.audit, proof.replay, plan.plan,
    chat.chat, machine.workers, machine.logs, machine.doctor,
)  # fmt: skip

app = typer.Typer(
    name="millrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from services.common.service.metrics import release

        typer.echo(f"millrace {release()}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the release and exit.")
    ] = False,
) -> None:
    """Post-trains language models with asynchronous reinforcement learning."""


for command in COMMANDS:
    app.command()(command)
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.add_typer(models.app, name="models")
app.add_typer(weights.app, name="weights")


def main() -> None:
    """Entry point. Exit codes: 0 success, 1 error (message on stderr), 2 wrong usage, 3 a followed job was cancelled, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except MillraceError as error:
        typer.echo(f"millrace: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
