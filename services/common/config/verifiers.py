"""Choice of the verifier that judges a task: names only, so that gateway and learner check a job without importing a verifier.

data_source ── overrides of the job ── `*` of the job ── built-in choice ──► name
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from services.common.config import plugins
from services.common.errors import ConfigError
from services.common.spec.data import PROCEDURAL_PREFIX


class BuiltIn(StrEnum):
    """The verifiers that Millrace includes (services/reward/verifiers/)."""

    MATH = "math"
    DAPO_MATH = "dapo_math"
    GSM8K = "gsm8k"
    REASONING_GYM = "reasoning_gym"


_BY_DATASET = {
    "gsm8k": BuiltIn.GSM8K,
    **dict.fromkeys(("math_dapo", "math_dapo_reasoning", "dapo-math-17k"), BuiltIn.DAPO_MATH),
    **dict.fromkeys(("math", "math500", "competition_math", "hendrycks_math"), BuiltIn.MATH),
}
_BY_PREFIX = {"aime": BuiltIn.DAPO_MATH, "math-": BuiltIn.MATH, "math_": BuiltIn.MATH}


def available() -> list[str]:
    """Names of all verifiers: the built-in ones, then the installed ones."""
    return plugins.available(plugins.VERIFIERS, BuiltIn)


def built_in_choice(data_source: str) -> str | None:
    """The usual verifier for a dataset of this name, or None.

    The owner before the slash and case do not matter: `openai/gsm8k` is `gsm8k`, `HuggingFaceH4/MATH-500` begins with `math-`.
    """
    if data_source.startswith(PROCEDURAL_PREFIX):
        return BuiltIn.REASONING_GYM
    dataset = data_source.lower().rpartition("/")[2]
    by_prefix = (name for prefix, name in _BY_PREFIX.items() if dataset.startswith(prefix))
    return _BY_DATASET.get(dataset) or next(by_prefix, None)


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Checks a job's `reward.verifiers`. Raises ConfigError, which lists those that exist, for the first wrong name."""
    known = available()
    for data_source, name in overrides.items():
        if name not in known:
            field = f"reward.verifiers[{data_source!r}]"
            raise ConfigError(f"there is no verifier {name!r}; there are {', '.join(known)}", field=field)


def choose_verifier(data_source: str, overrides: Mapping[str, str]) -> str:
    """The name of the verifier that judges tasks of this `data_source`.

    Of the overrides, the job's `reward.verifiers`, an exact data_source wins over `*`, and both win over the built-in choice.

    Raises:
        ConfigError: no verifier is chosen, or it does not exist; names the data_source and lists the verifiers.
    """
    name = overrides.get(data_source) or overrides.get("*") or built_in_choice(data_source)
    known = available()
    if name is None:
        raise ConfigError(
            f"no verifier is known for data_source {data_source!r}: name one in reward.verifiers; there are {', '.join(known)}"
        )
    if name not in known:
        raise ConfigError(f"data_source {data_source!r}: there is no verifier {name!r}; there are {', '.join(known)}")
    return name
