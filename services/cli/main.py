"""The `millrace` command. Heavy modules are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from services.cli import (
    chat,
    dead_letter_commands,
    jobs_commands,
    machine_commands,
    proof_commands,
    retention_commands,
    stack_commands,
)
from services.common.errors import MillraceError

COMMANDS = (
    stack_commands.up,
    stack_commands.down,
    jobs_commands.submit,
    jobs_commands.jobs,
    jobs_commands.show,
    jobs_commands.rollouts,
    jobs_commands.pause,
    jobs_commands.resume,
    jobs_commands.cancel,
    retention_commands.delete,
    retention_commands.prune,
    proof_commands.ledger,
    proof_commands.audit,
    proof_commands.replay,
    chat.chat,
    machine_commands.workers,
    machine_commands.logs,
    machine_commands.doctor,
)

app = typer.Typer(
    name="millrace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from services.common.process_metrics import release

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
app.add_typer(dead_letter_commands.app, name="dead-letters")


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 an error (said on stderr), 2 wrong usage, 3 a followed job was cancelled, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except MillraceError as error:
        typer.echo(f"millrace: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
