"""The tokenizer of the demo's small model: single bytes, and the fixed words of the arithmetic prompts as one token each.

A byte-level alphabet without merges: any text survives `decode(encode(text))` unchanged. `chain_sum`'s wording is added
as whole tokens (the question, ` + `, ` - `, ` =`), which shortens a prompt from about 75 tokens to 10, since nothing is to be
learned from spelling them; numbers and answers stay one token a character.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUESTION = "State the final answer to the following arithmetic problem: "
PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT)
PHRASES = (QUESTION, " + ", " - ", " =")
VOCAB_SIZE = 272
"""5 special tokens, 256 bytes, 4 phrases; filled up to a multiple of SHARES, so that ranks share it evenly."""
SHARES = 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A tool answers as a user does: the vocabulary has no token for it."""


def make_tokenizer(max_positions: int, phrases: Sequence[str] = PHRASES) -> Any:  # noqa: ANN401  transformers is untyped here
    """A `PreTrainedTokenizerFast` with the chat template; ids: special tokens, then bytes, then phrases."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    spare = [f"<|spare_{index}|>" for index in range(-core.get_vocab_size() % SHARES)]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in spare])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:  # noqa: ANN401
    """Writes tokenizer and chat template, under the class name that every transformers since 4 knows."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = CHAT_TEMPLATE  # also here: older readers do not look for chat_template.jinja
    path.write_text(json.dumps(settings, indent=2))
