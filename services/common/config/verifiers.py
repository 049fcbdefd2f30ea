"""Choice of the scorer that judges a task: names only, so that gateway and learner check a job without importing a verifier.

data_source ── overrides of the job ── `*` of the job ── built-in choice ──► name
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from pydantic import ValidationError

from services.common.config import plugins
from services.common.errors import ConfigError, Problem
from services.common.spec.base import Section
from services.common.spec.data import ENVIRONMENT_PREFIX, PROCEDURAL_PREFIX
from services.common.spec.job import problems_of
from services.common.spec.reward import RewardSpec
from services.common.spec.verifiers import (
    CodeSettings,
    ExactMatchSettings,
    FormatSettings,
    FuzzyMatchSettings,
    MultipleChoiceSettings,
)


class BuiltIn(StrEnum):
    """The verifiers that Millrace includes (services/reward/verifiers/)."""

    MATH = "math"
    DAPO_MATH = "dapo_math"
    GSM8K = "gsm8k"
    REASONING_GYM = "reasoning_gym"
    MULTIPLE_CHOICE = "multiple_choice"
    EXACT_MATCH = "exact_match"
    FUZZY_MATCH = "fuzzy_match"
    FORMAT = "format"
    CODE = "code"


ENVIRONMENT = "environment"
"""The scorer of episodes: the environment's own reward."""


_SETTINGS: dict[str, type[Section]] = {
    BuiltIn.MULTIPLE_CHOICE: MultipleChoiceSettings,
    BuiltIn.EXACT_MATCH: ExactMatchSettings,
    BuiltIn.FUZZY_MATCH: FuzzyMatchSettings,
    BuiltIn.FORMAT: FormatSettings,
    BuiltIn.CODE: CodeSettings,
}
_WITHOUT_SETTINGS = frozenset({BuiltIn.MATH, BuiltIn.DAPO_MATH, BuiltIn.GSM8K})

CODE_IS_OFF = "verifier code runs programs that the model writes; it is off on this server until its operator sets MILLRACE_CODE_REWARD=1"


_BY_DATASET = {
    "gsm8k": BuiltIn.GSM8K,
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "dapo-math-17k"), BuiltIn.DAPO_MATH),
    **dict.fromkeys(("math", "math500", "competition_math", "hendrycks_math"), BuiltIn.MATH),
    **dict.fromkeys(
        ("hellaswag", "mmlu", "ai2_arc", "arc_easy", "arc_challenge", "openbookqa", "commonsense_qa"),
        BuiltIn.MULTIPLE_CHOICE,
    ),
    **dict.fromkeys(("apps", "taco", "codecontests", "codeforces", "humaneval", "mbpp"), BuiltIn.CODE),
}
_BY_PREFIX = {"aime": BuiltIn.DAPO_MATH, "math-": BuiltIn.MATH, "math_": BuiltIn.MATH}


def available() -> list[str]:
    """Names of all verifiers: the built-in ones, then the installed ones."""
    return plugins.available(plugins.VERIFIERS, (*BuiltIn, ENVIRONMENT))


def built_in_choice(data_source: str) -> str | None:
    """The usual verifier for a dataset of this name, or None.

    The owner before the slash and case do not matter: `openai/gsm8k` is `gsm8k`, `HuggingFaceH4/MATH-500` begins with `math-`.
    """
    if data_source.startswith(PROCEDURAL_PREFIX):
        return BuiltIn.REASONING_GYM
    if data_source.startswith(ENVIRONMENT_PREFIX):
        return ENVIRONMENT
    dataset = data_source.lower().rpartition("/")[2]
    by_prefix = (name for prefix, name in _BY_PREFIX.items() if dataset.startswith(prefix))
    return _BY_DATASET.get(dataset) or next(by_prefix, None)


def known_names(reward: RewardSpec) -> list[str]:
    """All names that a job with this section may use: of verifiers, then of what it defines itself."""
    return [*available(), *reward.named]


def check_reward(reward: RewardSpec, *, code: bool = False) -> None:
    """Checks the names in a job's section `reward`. Raises ConfigError with every wrong one, its field and those that exist.

    `code`: whether this server's operator lets verifiers run code that a model writes.
    """
    problems = [*_clashes(reward), *_unknown(reward), *_settings(reward)]
    if not code:
        problems += [Problem(field, CODE_IS_OFF) for field, name in _uses(reward) if name == BuiltIn.CODE]
    if problems:
        raise ConfigError(*problems)


def choose_verifier(data_source: str, reward: RewardSpec, *, held_out: bool = False) -> str:
    """The name of the scorer that judges tasks of this `data_source`.

    An exact data_source wins over `*`, and both win over the built-in choice. Of held-out tasks, `eval_verifiers` wins over `verifiers`.

    Raises:
        ConfigError: no verifier is chosen, or it does not exist; names the data_source and lists the verifiers.
    """
    tables = [reward.eval_verifiers, reward.verifiers] if held_out else [reward.verifiers]
    chosen = (table.get(data_source) or table.get("*") for table in tables)
    name = next(filter(None, chosen), None) or built_in_choice(data_source)
    known = known_names(reward)
    if name is None:
        raise ConfigError(
            f"no verifier is known for data_source {data_source!r}: name one in reward.verifiers; there are {', '.join(known)}"
        )
    if name not in known:
        raise ConfigError(f"data_source {data_source!r}: there is no verifier {name!r}; there are {', '.join(known)}")
    return name


def _uses(reward: RewardSpec) -> Iterator[tuple[str, str]]:
    """Each field that names a scorer, and the name."""
    for section in ("verifiers", "eval_verifiers"):
        for data_source, name in getattr(reward, section).items():
            yield f"reward.{section}[{data_source!r}]", name
    for rubric, spec in reward.rubrics.items():
        for name in spec.verifier_function:
            yield f"reward.rubrics.{rubric}.verifier_function", name


def _clashes(reward: RewardSpec) -> Iterator[Problem]:
    verifiers = set(available())
    for name, section in reward.named.items():
        if name in verifiers:
            yield Problem(f"reward.{section}.{name}", f"{name!r} is a verifier of this server: take another name")


def _unknown(reward: RewardSpec) -> Iterator[Problem]:
    known = known_names(reward)
    for field, name in _uses(reward):
        if name not in known:
            yield Problem(field, f"there is no verifier {name!r}; there are {', '.join(known)}")


def _settings(reward: RewardSpec) -> Iterator[Problem]:
    """What is wrong with the settings of verifiers; those of installed packages are their own."""
    verifiers = available()
    for name, given in reward.config.items():
        field, kind = f"reward.config.{name}", _SETTINGS.get(name)
        if name not in verifiers:
            yield Problem(field, f"there is no verifier {name!r}; there are {', '.join(verifiers)}")
        elif name in _WITHOUT_SETTINGS and given:
            yield Problem(field, f"verifier {name} has no settings")
        elif kind is not None:
            try:
                kind.model_validate(given)
            except ValidationError as error:
                yield from problems_of(error, kind, f"{field}.")
