"""Conversion: a configuration file, a script or overrides become a job spec with a report.

file or script ─► dotted keys ─► overrides ─► references ─► table of the source ─► draft ─► `--set` ─► YAML, parsed again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from services.cli.imports.document import nested, write
from services.cli.imports.draft import Draft
from services.cli.imports.inputs import hydra
from services.cli.imports.inputs.keys import flat, read_text, read_yaml, resolve
from services.cli.imports.inputs.script import read_call
from services.cli.imports.mindspeed import table as mindspeed
from services.cli.imports.result import FieldValue, Imported
from services.cli.imports.rules import Source, translate
from services.cli.imports.settings import Settings
from services.cli.imports.verl import table as verl
from services.cli.imports.verl.defaults import ACTOR
from services.cli.imports.verl.sampling import ROWS
from services.cli.overrides import apply_change
from services.common.errors import ConfigError, Problem
from services.common.spec.job import parse_spec


class SourceName(StrEnum):
    """Trainers whose configurations can be imported."""

    VERL = "verl"
    MINDSPEED_RL = "mindspeed-rl"


VERL_SECTIONS = frozenset({"actor_rollout_ref", "data", "trainer", "algorithm", "critic", "reward", "reward_model"})


@dataclass(frozen=True, slots=True)
class Request:
    """What to import."""

    file: Path | None = None
    """YAML file."""
    script: Path | None = None
    """Shell script that calls verl's trainer."""
    overrides: tuple[str, ...] = ()
    """Hydra's, applied after the file or the script."""
    source: SourceName | None = None
    """None: by the sections that the keys have."""
    rows: int | None = None
    """Rows of the training data, by which epochs become steps."""
    changes: tuple[str, ...] = ()
    """`KEY.PATH=VALUE` of the job spec."""


def convert(request: Request, environment: Mapping[str, str]) -> Imported:
    """The job spec that a configuration becomes. `environment` is for the variables of scripts, `oc.env` and `~`.

    Raises ConfigError, with a problem for each key of a wrong type, when the input cannot be read.
    """
    given: dict[str, object] = dict(read_yaml(request.file)) if request.file else {}
    overrides, notes, config_name = list(request.overrides), [], ""
    if request.script:
        try:
            call = read_call(read_text(request.script), environment)
        except ConfigError as error:
            raise error if str(request.script) in str(error) else ConfigError(f"{request.script}: {error}") from error
        overrides, notes, config_name = [*call.overrides, *overrides], call.notes, call.config_name
    given = hydra.apply(overrides, given)
    if not given:
        raise ConfigError(
            "nothing to import: give a YAML file, --script FILE.sh, or overrides such as data.train_batch_size=64"
        )
    source = _source(request.source, given, config_name)
    settings = _settings(source, given, environment, request.rows)
    draft = translate(source, settings)
    if settings.problems:
        raise ConfigError(*settings.problems)
    return _result(source, draft, notes, request)


def _source(name: SourceName | None, given: Mapping[str, object], config_name: str) -> Source:
    sections = {key.partition(".")[0] for key in given}
    if name is SourceName.MINDSPEED_RL or (name is None and sections & mindspeed.SECTIONS):
        return mindspeed.SOURCE
    if name is None and not sections & VERL_SECTIONS:
        known = f"{', '.join(sorted(mindspeed.SECTIONS))} (MindSpeed-RL); {', '.join(sorted(VERL_SECTIONS))} (verl)"
        raise ConfigError(f"it has no section of a known source: {known}; --from says which it is")
    engines = (config_name, given.get("model_engine"), given.get(f"{ACTOR}.strategy"))
    named = any("megatron" in str(engine) for engine in engines)
    return verl.source(megatron=named or any(key.startswith(f"{ACTOR}.megatron.") for key in given))


def _settings(
    source: Source, given: Mapping[str, object], environment: Mapping[str, str], rows: int | None
) -> Settings:
    home = environment.get("HOME", "~")
    resolved = {key: _at_home(value, home) for key, value in resolve(given, source.defaults, environment).items()}
    defaults = {key: _at_home(value, home) for key, value in source.defaults.items()}
    return Settings(resolved, defaults if rows is None else defaults | {ROWS: rows})


def _at_home(value: object, home: str) -> object:
    """A path with the home folder in place of `~/`."""
    if isinstance(value, list):
        return [_at_home(item, home) for item in value]
    return type(value)(f"{home}{value[1:]}") if isinstance(value, str) and value.startswith("~/") else value


def _result(source: Source, draft: Draft, notes: Sequence[str], request: Request) -> Imported:
    fields = _changed(draft.fields, request.changes)
    origin = request.script or request.file
    name = origin.name if origin else "overrides"
    heading = f"Job spec, imported from {name} of {source.name}.\nBehind each field: the key that it comes from."
    text = write(fields, heading, draft.settings.given)
    lines = draft.lines()
    return Imported(
        source.name, text, nested(fields), lines, draft.default_lines(), tuple(notes), _problems(text, fields)
    )


def _changed(fields: Mapping[str, FieldValue], changes: Sequence[str]) -> dict[str, FieldValue]:
    """The fields after the user's `--set` changes."""
    document = nested(fields)
    for change in changes:
        apply_change(document, change)
    if not changes:
        return dict(fields)
    found: dict[str, FieldValue] = {}
    for name, value in _leaves(document, fields):
        kept = fields.get(name)
        found[name] = kept if kept is not None and kept.value == value else FieldValue(value, ("--set",), "")
    return found


def _leaves(document: Mapping[str, object], fields: Mapping[str, FieldValue]) -> list[tuple[str, object]]:
    """Dotted field → value; a field whose value is a mapping stays whole."""
    whole = {name: value.value for name, value in fields.items() if isinstance(value.value, dict) and value.value}
    values = dict(flat(document))
    for name in whole:
        inside = [key for key in values if key.startswith(f"{name}.")]
        kept = {key.removeprefix(f"{name}."): values.pop(key) for key in inside}
        if kept:
            values[name] = kept
    return list(values.items())


def _problems(text: str, fields: Mapping[str, FieldValue]) -> tuple[Problem, ...]:
    """Why the spec is not valid; each names the field, and the keys that it comes from."""
    try:
        parse_spec(text)
    except ConfigError as error:
        return tuple(Problem(item.field, f"{item.message}{_origin(item.field, fields)}") for item in error.problems)
    return ()


def _origin(field: str, fields: Mapping[str, FieldValue]) -> str:
    keys = fields[field].keys if field in fields else ()
    return f", from {', '.join(keys)}" if keys else ""
