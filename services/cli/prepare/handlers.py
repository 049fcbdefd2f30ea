"""Handlers: what a dataset's rows are, as the standard columns.

row ──► handler(row, map_keys) ──► {prompt, data_source, ability, reward_model {style, ground_truth}, extra_info}

A package installs its own under the entry-point group `millrace.data_handlers`: a function of the same arguments and result. What it raises
for a row sets that row aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.cli.prepare import conversations as talks
from services.cli.prepare.conversations import Cells, Sample, text_of
from services.common.config import plugins
from services.common.data.rows import gsm8k_number
from services.common.errors import ConfigError, DataError, did_you_mean
from services.reward.verifiers.dapo_math import last_boxed

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
RowHandler = Callable[[Mapping[str, Any], Mapping[str, str]], Mapping[str, Any]]


class BuiltIn(StrEnum):
    """The handlers that Millrace includes."""

    DAPO_MATH_17K = "dapo_math_17k"
    GSM8K = "gsm8k"
    MATH = "math"
    HELLASWAG = "hellaswag"
    FULL_HH_RLHF = "full_hh_rlhf"
    ALPACA = "alpaca"
    PAIRS = "pairs"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class Handler:
    """A built-in handler."""

    read: Callable[[Cells], Sample]
    data_source: str
    ability: str
    columns: Mapping[str, str]
    """Column by role; `map_keys` overrides it."""
    style: str = "rule"
    """Of the reward: `rule` where an answer can be checked, `model` where it must be judged."""
    extra: tuple[str, ...] = field(default=())
    """Keys of `extra_info` that the handler itself adds."""

    def __call__(self, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        """The row in the standard columns. Raises DataError for a row that is not what the handler reads."""
        names = {**self.columns, **columns}
        sample = self.read({role: row.get(column) for role, column in names.items() if column})
        source, ability = row.get("data_source"), row.get("ability")
        return {
            "prompt": sample.prompt,
            "data_source": source if isinstance(source, str) and source else self.data_source,
            "ability": ability if isinstance(ability, str) and ability else self.ability,
            "reward_model": {"style": self.style, "ground_truth": sample.ground_truth},
            "extra_info": sample.extra,
        }


def _gsm8k(cells: Cells) -> Sample:
    number = gsm8k_number(text_of(cells, "response"), "response")
    return Sample(talks.user(text_of(cells, "prompt")), number)


def _math(cells: Cells) -> Sample:
    solution = text_of(cells, "response")
    boxed = last_boxed(solution)
    if boxed is None and "\n" in solution.strip():
        raise DataError("the solution has no \\boxed{…}")
    return Sample(talks.user(text_of(cells, "prompt")), solution.strip() if boxed is None else boxed)


def _dapo(cells: Cells) -> Sample:
    answer = cells.get("response")
    truth = answer.get("ground_truth") if isinstance(answer, Mapping) else answer
    return Sample(talks.with_system(cells, talks.messages_of(cells.get("prompt"), "prompt")), truth)


def _hellaswag(cells: Cells) -> Sample:
    endings, label = cells.get("query"), cells.get("response")
    if not isinstance(endings, list) or not 1 < len(endings) <= len(LETTERS):
        raise DataError("the endings are no list of texts")
    if not str(label).isdecimal() or int(str(label)) >= len(endings):
        raise DataError(f"the label {label!r} is not the number of an ending")
    choices = "\n".join(f"{letter}. {ending}" for letter, ending in zip(LETTERS, endings, strict=False))
    question = f"Which ending continues the text best?\n\n{text_of(cells, 'prompt')}\n\n{choices}"
    last = "End with a line `Answer: X`, where X is the letter of the ending."
    return Sample(talks.user(f"{question}\n\n{last}"), LETTERS[int(str(label))])


BUILT_IN: Mapping[str, Handler] = {
    BuiltIn.DAPO_MATH_17K: Handler(_dapo, "math_dapo", "math", {"prompt": "prompt", "response": "reward_model"}),
    BuiltIn.GSM8K: Handler(_gsm8k, "openai/gsm8k", "math", {"prompt": "question", "response": "answer"}),
    BuiltIn.MATH: Handler(_math, "hendrycks_math", "math", {"prompt": "problem", "response": "solution"}),
    BuiltIn.HELLASWAG: Handler(
        _hellaswag, "hellaswag", "commonsense", {"prompt": "ctx", "query": "endings", "response": "label"}
    ),
    BuiltIn.FULL_HH_RLHF: Handler(
        talks.read_transcript, "full_hh_rlhf", "dialogue",
        {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}, "model", ("rejected",),
    ),
    BuiltIn.ALPACA: Handler(
        talks.read_alpaca, "alpaca", "instruction",
        {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"},
    ),
    BuiltIn.PAIRS: Handler(
        talks.read_pair, "pairs", "instruction",
        {"prompt": "instruction", "query": "input", "history": "history", "system": "system", "chosen": "chosen", "rejected": "rejected"},
        "model", ("rejected",),
    ),
    BuiltIn.CHAT: Handler(
        talks.read_chat, "chat", "dialogue",
        {"prompt": "messages", "query": "conversations", "history": "prompt", "response": "ground_truth", "system": "system"}, "model",
    ),
}  # fmt: skip
ALIASES: Mapping[str, str] = {
    "Math17kAlpacaStyleInstructionHandler": BuiltIn.DAPO_MATH_17K,
    "R1AlpacaStyleInstructionHandler": BuiltIn.ALPACA,
    "AlpacaStyleInstructionHandler": BuiltIn.ALPACA,
    "AlpacaStylePairwiseHandler": BuiltIn.PAIRS,
    "dapo-math-17k": BuiltIn.DAPO_MATH_17K,
}
"""Other names of built-in handlers: MindSpeed-RL's, and datasets'."""


def find_handler(name: str) -> RowHandler:
    """The handler of this name, whatever its case. Raises ConfigError when there is none, or an installed one cannot be imported."""
    built_in = {**BUILT_IN, **{alias: BUILT_IN[known] for alias, known in ALIASES.items()}}
    found = {key.lower(): handler for key, handler in built_in.items()}.get(name.lower())
    if found is not None:
        return found
    installed = plugins.offered(plugins.DATA_HANDLERS)
    if name not in installed:
        known = [*plugins.available(plugins.DATA_HANDLERS, BuiltIn), *ALIASES]
        raise ConfigError(
            f"there is no handler {name!r}{did_you_mean(name, known)} (there are {', '.join(known)})",
            field="handler_name",
        )
    try:
        handler: RowHandler = installed[name].load()
    except Exception as error:  # the package is at fault for whatever importing it raises
        raise ConfigError(f"{name!r} cannot be imported: {error}", field="handler_name") from error
    return handler
