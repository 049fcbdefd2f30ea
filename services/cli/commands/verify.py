"""Command that tries a verifier on the rows of a dataset, with no service running: `millrace verify`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.commands.options import AsJson
from services.cli.views.terminal import print_result

if TYPE_CHECKING:
    from services.common.data.references import ReferenceTrial
    from services.common.spec.data import DataSourceSpec
    from services.common.spec.reward import RewardSpec


def verify(
    verifier: Annotated[str, typer.Argument(help="Name of a verifier that is built in or installed here.")],
    data: Annotated[str, typer.Argument(help="A parquet or jsonl file, or reasoning_gym:TASK.")],
    count: Annotated[int, typer.Option("-n", min=1, max=1000, help="Rows to try, the first.")] = 5,
    response: Annotated[
        str | None, typer.Option("--response", help="A response of your own to judge for each row.", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=VALUE", help="Change a setting of section reward or data.train; may be repeated."
        ),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Try a verifier: is each row's reference right in its judgement, and in which form?"""
    from services.cli.overrides import apply_changes
    from services.cli.views.check import is_right, print_references
    from services.common.spec.job import parse_spec

    file = Path(data)
    source = str(file.resolve()) if file.is_file() else data
    document = {
        "model": {"path": "none"},
        "data": {"train": {"source": source}},
        "reward": {"verifiers": {"*": verifier}},
    }
    apply_changes(document, changes or [])
    spec = parse_spec(json.dumps(document))
    trials = [asdict(trial) for trial in asyncio.run(_tried(spec.data.train, spec.reward, count, response))]
    print_result(trials, print_references, as_json=as_json)
    raise typer.Exit(0 if all(map(is_right, trials)) else 1)


async def _tried(source: DataSourceSpec, reward: RewardSpec, count: int, response: str | None) -> list[ReferenceTrial]:
    """The first rows' references, judged as in a job. Raises ConfigError for a source or a name that is wrong."""
    from services.common.config.settings import load_settings
    from services.common.config.verifiers import check_reward
    from services.common.data.bounds import DataBounds
    from services.common.data.references import trial_group, trial_of
    from services.common.data.source import data_roots, open_within
    from services.common.programs.sandbox import CODE_REWARD
    from services.common.streams.types import Purpose
    from services.reward.dispatch import Dispatch
    from services.reward.models import Models
    from services.reward.pool.pool import Pool

    settings = load_settings()
    check_reward(reward, code=settings.runs_code)
    roots = [Path(source.source).parent, *data_roots(settings)]
    tasks = open_within(source, roots, DataBounds.of(settings), field="data.train", until=0.0, whole=False)
    groups = [trial_group(index, tasks[index], response, Purpose.TRAIN) for index in range(min(count, len(tasks)))]
    models = Models(settings)
    pool = Pool(log_level="WARNING", environment={CODE_REWARD: settings.code_reward})
    try:
        async with Dispatch(reward, pool, settings, models.of(reward)) as dispatch:
            scored = await asyncio.gather(*map(dispatch.judge, groups))
    finally:
        await models.close()
    return [trial_of(group, each.verdicts) for group, each in zip(groups, scored, strict=True)]
