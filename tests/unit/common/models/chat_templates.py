"""Chat templates that behave as those of known families, and a tokenizer made to be ambiguous: for tests of transcripts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from services.common.models.prompts import PromptEncoder

MOST = 10_000
# The templates behave as those of the families that they are named after; the words are ours.
CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen2.5: a line break after the end of a turn, and tools that answer as a user does."""
HEADERS = (
    "<|begin|>{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
"""Llama 3: headers, and nothing after the end of a turn."""
KEEPS_THOUGHTS = "loop.index0 > last.user and (loop.last or thought)"
THINKER = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1]"
    ".strip('\n') if '</think>' in m.content else '' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>assistant\n"
    f"{{% if {KEEPS_THOUGHTS} %}}<think>\n{{{{ thought }}}}\n</think>\n\n{{% endif %}}{{{{ said }}}}<|im_end|>\n{{% else %}}"
    "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3: the thoughts before the last user's message are left out, and the last answer has a thought, an empty one if need be."""
ALL_THOUGHTS = THINKER.replace(KEEPS_THOUGHTS, "true")
"""The same, and every answer keeps its thought."""
STARTED = "<|im_start|>assistant\n{% endif %}"
OPENED = {
    template: template.removesuffix(STARTED) + STARTED.replace("\n", "\n<think>\n")
    for template in (THINKER, ALL_THOUGHTS)
}
"""The generation prompt begins the thought itself: DeepSeek-R1, Qwen3.5."""
SPACED = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}<|eot|>{% endif %}"
    "{% endfor %}"
)
"""Mistral: no generation prompt, and the space before an answer is the policy's to sample. It says nothing of tools."""
MANNERED = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
"""No special token closes a turn."""
NO_TOOLS = CHATML.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|stop|>", "<|eot|>")
NAMED = {"chatml": CHATML, "headers": HEADERS, "all thoughts": ALL_THOUGHTS}
ENDS = {CHATML: "<|im_end|>", HEADERS: "<|eot|>"}
LINE_BREAK = "Ċ"
"""In a vocabulary of bytes."""


@cache
def encoder(template: str, *, absorbs: bool = False) -> PromptEncoder:
    """A tokenizer made to be ambiguous: runs of a, b and c merge in several ways, so that text has other tokens than were sampled.

    A line break merges with what follows it, and so the end of a template's words with the beginning of a message or a reply.
    `absorbs`: special tokens take the white space after them in, as Phi-3's do.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(LINE_BREAK, after) for after in ("a", "b", "c", LINE_BREAK)]
    merges += [(a, b) for a in "abc" for b in "abc"] + [(f"{a}{b}", c) for a in "abc" for b in "abc" for c in "abc"]
    tokens = [*letters, *dict.fromkeys("".join(pair) for pair in merges)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=absorbs) for token in SPECIALS])
    folder = Path(mkdtemp())
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=template)  # noqa: S106
    made.save_pretrained(folder)
    return PromptEncoder(folder)
