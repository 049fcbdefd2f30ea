"""Commands `millrace up` and `millrace down`."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, GatewayPort, Home
from services.cli.views.terminal import say


def up(
    home: Home = DEFAULT_HOME,
    rollout: Annotated[int, typer.Option(min=0, max=64, help="Rollout servers.")] = 1,
    port: GatewayPort = 8080,
    metrics_base: Annotated[
        int | None, typer.Option(min=1, max=65000, help="First metrics port, counting up; default: free ones.")
    ] = None,
    *,
    background: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
) -> None:
    """Start Redis (unless REDIS_URL is set), gateway, reward, environment, learner and rollout servers, and keep them alive."""
    from services.cli.up import detach, run_up
    from services.common.service.entry import keep_files_private

    keep_files_private()
    home = home.resolve()
    if not background:
        run_up(home, servers=rollout, gateway_port=port, metrics_base=metrics_base, say=say)
        return
    arguments = ["--rollout", str(rollout), "--port", str(port)]
    arguments += [] if metrics_base is None else ["--metrics-base", str(metrics_base)]
    state = detach(home, arguments, say)
    for name, cause in state.lost.items():
        say(f"{name} could not be started, and is tried again every minute: {cause}")
    say(f"millrace is up: {state.url} (token: {state.token_file or 'MILLRACE_TOKEN'})")


def down(home: Home = DEFAULT_HOME) -> None:
    """Drain and end what `millrace up` started."""
    from services.cli.up import run_down

    run_down(home.resolve(), say)
