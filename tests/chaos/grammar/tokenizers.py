"""Bad parts of tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


def _changed(change: Callable[[dict[str, Any], random.Random], object], name: str = FILE) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        draft.change_json(name, lambda document: change(document, rng))
        draft.expect(Expected.ENDS)

    return part


def _written(make: Callable[[bytes, random.Random], bytes], name: str = FILE) -> Part:
    def part(draft: Draft, rng: random.Random) -> None:
        draft.write(name, make(draft.read(name), rng))
        draft.expect(Expected.ENDS)

    return part


def _odd(part: Part) -> Part:
    """May also be usable."""

    def odd(draft: Draft, rng: random.Random) -> None:
        before = draft.expected
        part(draft, rng)
        draft.expected = before

    return odd


def _special(kind: Callable[[Path], None], name: str = FILE) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        path = draft.model() / name
        path.unlink()
        kind(path)
        draft.expect(Expected.REFUSED)

    return part


def _split(regex: str, text: str) -> Part:
    """Every prompt ends in the text on which the expression backtracks."""

    def part(draft: Draft, _: random.Random) -> None:
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        draft.change_json(FILE, lambda document: document.update(pre_tokenizer=split))
        draft.change_json(CONFIG, lambda document: document.update(chat_template=document["chat_template"] + text))

    return part


def _multiplied(document: dict[str, Any], rng: random.Random) -> None:
    """Each rule makes every `r` ten of them."""
    rule = {"type": "Replace", "pattern": {"String": "r"}, "content": "r" * 10}
    document["normalizer"] = {"type": "Sequence", "normalizers": [rule] * rng.randint(8, 12)}


def _deep_normalizer(document: dict[str, Any], rng: random.Random) -> None:
    rule: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(rng.randint(100, 400)):
        rule = {"type": "Sequence", "normalizers": [rule]}
    document["normalizer"] = rule


def _long_template(document: dict[str, Any], rng: random.Random) -> None:
    special = {"id": "[X]", "ids": [1], "tokens": ["a"]}
    piece = [{"SpecialToken": {"id": "[X]", "type_id": 0}}] * rng.randint(50_000, 200_000)
    document["post_processor"] = {
        "type": "TemplateProcessing", "single": [*piece, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"[X]": special},
    }  # fmt: skip


def _huge_vocabulary(document: dict[str, Any], rng: random.Random) -> None:
    document["model"]["vocab"] |= {f"w{number}": number for number in range(128, rng.choice((200_000, 2_000_000)))}


def _added_tokens(document: dict[str, Any], rng: random.Random) -> None:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": rng.random() < 0.5}
    document["added_tokens"] = [{"id": 10**9 + number, "content": f"<{number}>", **flags} for number in range(100)]


_KEYS = (
    "model_max_length",
    "eos_token",
    "bos_token",
    "pad_token",
    "padding_side",
    "additional_special_tokens",
    "extra_special_tokens",
    "clean_up_tokenization_spaces",
)
_VALUES: tuple[Any, ...] = (-1, 10**400, "x" * 10**6, None, [], {}, [[]], True, 1.5, {"content": 7}, ["a"] * 10_000)

TOKENIZERS: Parts = {
    "tokenizer: unknown model type": _changed(
        lambda d, rng: d["model"].update(type=rng.choice(("Nope", "BPE2", "", 7)))
    ),
    "tokenizer: newer version": _odd(_changed(lambda d, _: d.update(version="9.0", model_v2={"kind": "new"}))),
    "tokenizer: unknown normalizer": _changed(lambda d, _: d.update(normalizer={"type": "Quantum"})),
    "tokenizer: unknown decoder": _changed(lambda d, _: d.update(decoder={"type": "Quantum"})),
    "tokenizer: truncated": _written(lambda raw, rng: raw[: rng.randrange(1, len(raw) - 1)]),
    "tokenizer: empty": _written(lambda _raw, _rng: b""),
    "tokenizer: null": _written(lambda _raw, rng: rng.choice((b"null", b"[]", b"7", b'"x"'))),
    "tokenizer: not UTF-8": _written(lambda raw, rng: b"\xff\xfe" + raw if rng.random() < 0.5 else rng.randbytes(5000)),
    "tokenizer: deep nesting": _written(lambda _, rng: _nested(rng.choice((2_000, 100_000, 3_000_000)))),
    "tokenizer: deep normalizer": _odd(_changed(_deep_normalizer)),
    "tokenizer: backtracking": _split("(a+)+$", "a" * 40 + "!"),
    "tokenizer: backtracking twice": _split("^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 60),
    "tokenizer: broken regex": _changed(lambda d, _: d["pre_tokenizer"].update(pattern={"Regex": "(((("})),
    "tokenizer: multiplying normalizer": _odd(_changed(_multiplied)),
    "tokenizer: long post-processor": _odd(_changed(_long_template)),
    "tokenizer: huge vocabulary": _odd(_changed(_huge_vocabulary)),
    "tokenizer: ids beyond the model": _changed(
        lambda d, _: d["model"].update(vocab={k: v + 1000 for k, v in d["model"]["vocab"].items()})
    ),
    "tokenizer: negative ids": _changed(
        lambda d, _: d["model"].update(vocab={k: -v for k, v in d["model"]["vocab"].items()})
    ),
    "tokenizer: ids that are texts": _changed(
        lambda d, _: d["model"].update(vocab={k: str(v) for k, v in d["model"]["vocab"].items()})
    ),
    "tokenizer: no vocabulary": _changed(lambda d, _: d["model"].update(vocab={})),
    "tokenizer: added tokens far beyond": _odd(_changed(_added_tokens)),
    "tokenizer: a pipe": _special(os.mkfifo),
    "tokenizer: a directory": _special(lambda path: path.mkdir()),
    "tokenizer: a link to /dev/zero": _special(lambda path: path.symlink_to("/dev/zero")),
    "tokenizer: a link to itself": _special(lambda path: path.symlink_to(path.name)),
    "tokenizer: config, a pipe": _special(os.mkfifo, CONFIG),
    "tokenizer: config, unknown class": _odd(
        _changed(lambda d, rng: d.update(tokenizer_class=rng.choice(("NoSuchTokenizer", 7, None, "os.system"))), CONFIG)
    ),
    "tokenizer: config, remote code": _changed(
        lambda d, _: d.update(auto_map={"AutoTokenizer": ["x.T", None]}), CONFIG
    ),
    "tokenizer: config, no object": _written(
        lambda _raw, rng: rng.choice((b"[]", b"null", b"{", b'{"a":' * 50_000)), CONFIG
    ),
    "tokenizer: config, odd values": _odd(
        _changed(lambda d, rng: d.update({rng.choice(_KEYS): rng.choice(_VALUES)}), CONFIG)
    ),
    "tokenizer: config, added tokens": _odd(
        _changed(
            lambda d, _: d.update(added_tokens_decoder={"99999999999": {"content": "x"}, "-1": 7, "x": {}}), CONFIG
        )
    ),
    "tokenizer: config, a million added tokens": _odd(
        _changed(
            lambda d, _: d.update(added_tokens_decoder={str(n): {"content": f"<{n}>"} for n in range(128, 200_000)}),
            CONFIG,
        )
    ),
}


def _nested(depth: int) -> bytes:
    return json.dumps({"version": "1.0"}).encode()[:-1] + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
