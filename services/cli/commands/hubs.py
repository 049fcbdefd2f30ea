"""Commands `millrace models pull|remove` and `millrace data pull|list|remove`: what is fetched from hubs into this home."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.commands.options import DEFAULT_HOME, AsJson, Home
from services.cli.views.terminal import open_console, print_json, say

if TYPE_CHECKING:
    from services.common.config.settings import Settings
    from services.common.hubs.fetcher import Progress
    from services.common.spec.reference import Reference

ModelReference = Annotated[str, typer.Argument(metavar="REFERENCE", help="hf:ORG/NAME[@REVISION] or modelscope:…")]
FileReference = Annotated[
    str, typer.Argument(metavar="REFERENCE", help="hf:ORG/NAME[@REVISION]/PATH.parquet (or .jsonl), or modelscope:…")
]
Force = Annotated[bool, typer.Option("--force", help="Also when a job that has not ended names it.")]


def pull_model(reference: ModelReference, home: Home = DEFAULT_HOME, *, as_json: AsJson = False) -> None:
    """Fetch a model; interrupted, the next pull goes on from there. Prints the reference with its commit."""
    _pull(reference, home, file=False, as_json=as_json)


def remove_model(reference: ModelReference, home: Home = DEFAULT_HOME, *, force: Force = False) -> None:
    """Remove a fetched model, or what an interrupted fetch has left. The reference names the commit, as `list` prints it."""
    _remove(reference, home, file=False, force=force)


def pull_data(reference: FileReference, home: Home = DEFAULT_HOME, *, as_json: AsJson = False) -> None:
    """Fetch a data file of a hub; interrupted, the next pull goes on from there. Prints the reference with its commit."""
    _pull(reference, home, file=True, as_json=as_json)


def list_data(home: Home = DEFAULT_HOME, *, as_json: AsJson = False) -> None:
    """List the data files that were fetched from hubs."""
    from services.cli.views.hubs import print_stored

    stored = list(home_settings(home).hub_folder.stored(data=True))
    if as_json:
        print_json([asdict(item) | {"reference": str(item.reference), "path": str(item.path)} for item in stored])
    else:
        print_stored(open_console(), stored)


def remove_data(reference: FileReference, home: Home = DEFAULT_HOME, *, force: Force = False) -> None:
    """Remove a fetched data file, or what an interrupted fetch has left. The reference names the commit."""
    _remove(reference, home, file=True, force=force)


def _pull(text: str, home: Path, *, file: bool, as_json: bool) -> None:
    settings, reference = home_settings(home), _parse(text, file=file)
    try:
        resolved = asyncio.run(_fetch(settings, reference))
    except KeyboardInterrupt:
        say("interrupted: what is there is kept, and the next pull goes on from there")
        raise typer.Exit(130) from None
    path = settings.hub_folder.path(resolved)
    if as_json:
        print_json({"reference": str(resolved), "path": str(path)})
    else:
        typer.echo(str(resolved))


async def _fetch(settings: Settings, reference: Reference) -> Reference:
    from services.common.errors import HubError, HubRefused
    from services.common.hubs.fetcher import Fetcher

    shown = ""

    async def report(progress: Progress) -> None:
        nonlocal shown
        if str(progress) != shown:
            shown = str(progress)
            say(f"{reference}: {shown}")

    async with Fetcher.of(settings) as fetcher:
        try:
            resolved = await fetcher.survey(reference)
            await fetcher.fetch(resolved, report)
        except HubRefused as error:
            raise HubRefused(f"{reference}: {error}") from error
        except HubError as error:
            raise HubError(f"{reference}: {error}") from error
    return resolved


def _remove(text: str, home: Path, *, file: bool, force: bool) -> None:
    from services.common.errors import ConfigError

    settings, reference = home_settings(home), _parse(text, file=file)
    if not reference.resolved:
        raise ConfigError(f"{reference}: name the commit, as the command `list` prints it")
    users = [] if force else _users(settings, reference)
    if users:
        raise ConfigError(
            f"{reference} is named by {', '.join(users)}, which has not ended (--force removes it all the same)"
        )
    if not settings.hub_folder.remove(reference):
        raise ConfigError(f"{reference} is not there")
    typer.echo(f"{reference} is removed")


def _users(settings: Settings, reference: Reference) -> list[str]:
    """Ids of this home's jobs that name the reference and have not ended."""
    from services.common.jobs.folder import JobFolder
    from services.common.jobs.record import ENDED

    found = []
    for path in sorted(settings.job_dir("").glob("*/job.json")):
        loaded = JobFolder(path.parent).load()
        if loaded is not None and loaded[0].get("state") not in ENDED and str(reference) in loaded[1]:
            found.append(path.parent.name)
    return found


def home_settings(home: Path) -> Settings:
    """The environment's settings, for this home."""
    from services.common.config.settings import load_settings

    return load_settings().model_copy(update={"home": home.resolve()})


def _parse(text: str, *, file: bool) -> Reference:
    from services.common.errors import ConfigError
    from services.common.spec.reference import parse_reference

    try:
        return parse_reference(text, file=file)
    except ValueError as error:
        raise ConfigError(str(error)) from error
