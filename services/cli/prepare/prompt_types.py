"""Prompt types: instructions around a prompt, by the names of MindSpeed-RL's `prompt_type`.

There a type is a text with a model's own marks; here prompts are messages, the model's chat template adds the marks, and of a type only the
instruction remains: a system message for rows that have none, and a text around the last user message.
"""

from __future__ import annotations

from typing import NamedTuple

from services.common.errors import ConfigError, did_you_mean

_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant first thinks about "
    "the reasoning process in the mind and then provides the user with the answer. The reasoning process and answer are enclosed within "
    "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think>"
    "<answer> answer here </answer>. Put your final answer within \\boxed{}."
)
"""The prompt of DeepSeek-R1-Zero (arXiv 2501.12948, table 1), with a box for the answer."""
_ASSISTANT = "You are a helpful assistant."


class PromptType(NamedTuple):
    """An instruction."""

    system: str = ""
    """System message; empty: none."""
    template: str = "{prompt}"
    """Text of the last user message."""


PROMPT_TYPES = {
    **dict.fromkeys(
        ("empty", "trl", "qwen3", "llama2", "llama3", "mistral", "mixtral", "gemma", "deepseek2", "deepseek2-lite", "deepseek3",
         "minicpm3", "baichuan2"), PromptType(),
    ),
    "default": PromptType(template="Human: {prompt}\nAssistant:"),
    "qwen": PromptType(_ASSISTANT),
    "qwen_r1": PromptType(_ASSISTANT, _R1 + "\n{prompt}"),
    "qwen_math_r1": PromptType("Please reason step by step, and put your final answer within \\boxed{}."),
    "deepseek3_r1": PromptType(template=_R1 + " {prompt}"),
    "alpaca": PromptType(
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
        "### Instruction:\n{prompt}\n\n### Response:\n",
    ),
}  # fmt: skip


def prompt_type(name: str) -> PromptType:
    """The type of this name. Raises ConfigError, with near matches, when there is none."""
    if name not in PROMPT_TYPES:
        known = ", ".join(PROMPT_TYPES)
        raise ConfigError(
            f"there is no prompt type {name!r}{did_you_mean(name, PROMPT_TYPES)} (there are {known})",
            field="prompt_type",
        )
    return PROMPT_TYPES[name]
