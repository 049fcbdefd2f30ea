"""The `millrace` command. Heavy modules are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.common.errors import ConfigError, MillraceError

if TYPE_CHECKING:
    from rich.console import Console

    from services.cli.client import GatewayClient

app = typer.Typer(
    name="millrace",
    help="Post-trains language models with asynchronous reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Home = Annotated[
    Path, typer.Option("--home", envvar="MILLRACE_HOME", help="Jobs, models, logs and `up.json` live below it.")
]
Url = Annotated[
    str | None,
    typer.Option("--url", envvar="MILLRACE_URL", help="A gateway other than this home's; its token is MILLRACE_TOKEN."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]

DEFAULT_HOME = Path(".millrace")


@app.command()
def up(
    home: Home = DEFAULT_HOME,
    rollout: Annotated[int, typer.Option(min=0, max=64, help="Rollout servers.")] = 1,
    port: Annotated[
        int,
        typer.Option(envvar="MILLRACE_GATEWAY_PORT", min=0, max=65535, help="The gateway's port; 0 takes a free one."),
    ] = 8080,
    metrics_base: Annotated[
        int | None, typer.Option(min=1, max=65000, help="First metrics port, counting up; default: free ones.")
    ] = None,
    *,
    background: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
) -> None:
    """Start Redis (unless REDIS_URL is set), gateway, reward, learner and rollout servers, and keep them alive."""
    from services.cli.up import detach, run_up

    home = home.resolve()
    if not background:
        run_up(home, servers=rollout, gateway_port=port, metrics_base=metrics_base, say=_say)
        return
    arguments = ["--rollout", str(rollout), "--port", str(port)]
    arguments += [] if metrics_base is None else ["--metrics-base", str(metrics_base)]
    state = detach(home, arguments, _say)
    _say(f"millrace is up: {state.url} (token: {state.token_file or 'MILLRACE_TOKEN'})")


@app.command()
def down(home: Home = DEFAULT_HOME) -> None:
    """Drain and end what `millrace up` started."""
    from services.cli.up import run_down

    run_down(home.resolve(), _say)


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="The job spec, YAML or JSON.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show each step until the job ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a job."""
    from services.cli.overrides import load_job

    document = load_job(file, changes or [])
    with _client(home, url) as client:
        job = client.submit(document)
        if as_json:
            _print_json(job)
        else:
            typer.echo(job["id"])
        if follow:
            _follow(client, job)


@app.command()
def jobs(home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """List jobs, newest first."""
    with _client(home, url) as client:
        found = client.jobs()
    if as_json:
        _print_json(found)
        return
    from services.cli.show import print_jobs

    print_jobs(_console(), found)


@app.command()
def show(job: JobId, home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """Show one job: state, progress, evaluations."""
    with _client(home, url) as client:
        record = client.job(job)
        history = client.history(job, max(1, int(record["step"])))
    if as_json:
        _print_json(record | {"evals": history["evals"]})
        return
    from services.cli.show import print_job

    print_job(_console(), record, history["evals"], history["steps"][-1] if history["steps"] else None)


@app.command()
def rollouts(
    job: JobId,
    count: Annotated[int, typer.Option("-n", min=1, max=500, help="Groups to show.")] = 3,
    home: Home = DEFAULT_HOME,
    url: Url = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a job's newest rollouts: prompts, texts and rewards."""
    with _client(home, url) as client:
        groups = client.rollouts(job, count)
    if as_json:
        _print_json(groups)
        return
    from services.cli.show import print_rollouts

    print_rollouts(_console(), groups)


@app.command()
def cancel(job: JobId, home: Home = DEFAULT_HOME, url: Url = None) -> None:
    """Cancel a job."""
    with _client(home, url) as client:
        record = client.cancel(job)
    asked = record["state"] != "cancelled"
    typer.echo(f"{job} is {record['state']}{': its learner was asked to stop' if asked else ''}")


@app.command()
def workers(home: Home = DEFAULT_HOME, url: Url = None, *, as_json: AsJson = False) -> None:
    """List the workers that are there and what they do."""
    with _client(home, url) as client:
        found = client.workers()
    if as_json:
        _print_json(found)
        return
    from services.cli.show import print_workers

    print_workers(_console(), found)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 an error (said on stderr), 2 wrong usage, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except MillraceError as error:
        typer.echo(f"millrace: {error}", err=True)
        sys.exit(1)


def _client(home: Path, url: str | None) -> GatewayClient:
    """A client of the named gateway, or of this home's.

    Raises:
        ConfigError: neither is there.
    """
    from services.cli.client import GatewayClient
    from services.cli.tokens import find_token
    from services.cli.up import require_state

    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url}: must begin with http:// or https://")
        return GatewayClient(url, find_token(None))
    state = require_state(home.resolve())
    return GatewayClient(state.url, find_token(state.token_file))


def _follow(client: GatewayClient, job: dict[str, Any]) -> None:
    from services.cli.show import step_line

    try:
        for step in client.follow(job["id"]):
            typer.echo(step_line(step, job["steps"]))
    except KeyboardInterrupt:
        _say(f"no longer following; {job['id']} goes on (`millrace show {job['id']}`, `millrace cancel {job['id']}`)")
        raise typer.Exit(130) from None
    ended = client.job(job["id"])
    _say(f"{job['id']} {ended['state']}{': ' + ended['cause'] if ended['cause'] else ''}")
    if ended["state"] != "succeeded":
        raise typer.Exit(1)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _say(text: str) -> None:
    typer.echo(text, err=True)


if __name__ == "__main__":
    main()
