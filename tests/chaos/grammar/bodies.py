"""Bad bodies of `POST /jobs`: what a parser takes long for, or reads as something else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import yaml

from tests.chaos.grammar.draft import JSON_TYPE, YAML_TYPE, Draft, Expected, Part, Parts

MIB = 1024**2


def _body(
    make: Callable[[str, random.Random], str | bytes],
    media_type: str = YAML_TYPE,
    expected: Expected = Expected.REFUSED,
) -> Part:
    """Makes a body of the good spec's text, in JSON or YAML."""

    def part(draft: Draft, rng: random.Random) -> None:
        dump = json.dumps if media_type == JSON_TYPE else yaml.safe_dump
        made = make(dump(draft.spec), rng)
        draft.body, draft.media_type = (
            made.encode(errors="surrogatepass") if isinstance(made, str) else made,
            media_type,
        )
        draft.expect(expected)

    return part


def _sixty(text: str, _: random.Random) -> str:
    return text + "odd: [" + ", ".join(["1" + ":59" * 60_000] * 5) + "]\n"


def _laughs(text: str, _: random.Random) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines) + "\n" + text


def _merges(text: str, _: random.Random) -> str:
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 12))]
    return "\n".join(lines) + "\n" + text


def _twice(text: str, _: random.Random) -> str:
    return text + "learner: {steps: 1}\n"


def _twice_in_json(text: str, _: random.Random) -> str:
    return text[:-1] + ', "learner": {"steps": 1}}'


def _sixty_steps(text: str, _: random.Random) -> str:
    document = yaml.safe_load(text)
    del document["learner"]
    return str(yaml.safe_dump(document)) + "learner: {steps: 1:59:59}\n"


BODIES: Parts = {
    "body: base-60 integers": _body(_sixty),
    "body: base-60 steps": _body(_sixty_steps),
    "body: aliases of aliases": _body(_laughs),
    "body: merges of merges": _body(_merges),
    "body: an alias of itself": _body(lambda text, _: text + "odd: &a [*a]\n"),
    "body: deep YAML": _body(
        lambda text, rng: text + "odd: " + "[" * (n := rng.choice((500, 10_000, 400_000))) + "]" * n
    ),
    "body: deep YAML blocks": _body(lambda text, _: text + "\n".join(" " * n + f"k{n}:" for n in range(1_400))),
    "body: deep JSON": _body(
        lambda text, rng: text[:-1] + ', "odd": ' + "[" * (n := rng.choice((500, 10_000, 400_000))) + "]" * n + "}",
        JSON_TYPE,
    ),
    "body: keys twice": _body(_twice),
    "body: keys twice in JSON": _body(_twice_in_json, JSON_TYPE),
    "body: an integer of 300,000 digits": _body(lambda text, _: text + f"odd: {'9' * 300_000}\n"),
    "body: an integer of 300,000 digits in JSON": _body(
        lambda text, _: text[:-1] + f', "odd": {"9" * 300_000}}}', JSON_TYPE
    ),
    "body: many integers of 4,000 digits": _body(
        lambda text, _: text + "odd: [" + ", ".join(["9" * 4_000] * 240) + "]\n"
    ),
    "body: floats of long texts": _body(lambda text, _: text + "odd: " + "1" * 900_000 + ".0e9\n"),
    "body: a tag that runs code": _body(lambda text, _: text + "odd: !!python/object/apply:os.system ['true']\n"),
    "body: an unknown tag": _body(lambda text, _: text + "odd: !nope {}\n"),
    "body: two documents": _body(lambda text, _: text + "---\n" + text),
    "body: binary": _body(lambda text, _: text + "odd: !!binary " + "A" * 900_000 + "\n"),
    "body: timestamps": _body(
        lambda text, _: text + "odd: [" + ", ".join(["2001-12-14t21:59:43.10-05:00"] * 15_000) + "]\n"
    ),
    "body: sets and pairs": _body(
        lambda text, _: text + "odd: !!set {" + ", ".join(f"? k{n}" for n in range(9_000)) + "}\n"
    ),
    "body: lists as keys": _body(lambda text, _: text + "? [a, b]\n: c\n"),
    "body: many comments": _body(lambda text, _: "#\n" * 500_000 + text, expected=Expected.HARMLESS),
    "body: a long line of blanks": _body(lambda text, _: text + "odd:" + " " * 1_000_000 + "x\n"),
    "body: a long quoted text": _body(lambda text, _: text + 'odd: "' + "\\x41" * 250_000 + '"\n'),
    "body: NUL": _body(lambda text, rng: text[: (n := rng.randrange(len(text)))] + "\0" + text[n:]),
    "body: NUL in JSON": _body(lambda text, rng: text[: (n := rng.randrange(len(text)))] + "\0" + text[n:], JSON_TYPE),
    "body: not UTF-8": _body(lambda text, rng: rng.choice((b"\xff\xfe", b"\xed\xa0\x80")) + text.encode(), JSON_TYPE),
    "body: half a letter": _body(lambda text, _: text[:-1] + ', "name": "\\ud800"}', JSON_TYPE),
    "body: NaN": _body(lambda text, _: text[:-1] + ', "learner": {"lr": NaN}}', JSON_TYPE),
    "body: 10 MB": _body(lambda text, _: text + "#" * 10 * MIB),
    "body: empty": _body(lambda _text, rng: rng.choice((b"", b" ", b"null", b"[]", b"7")), JSON_TYPE),
    "body: cut": _body(lambda text, rng: text[: rng.randrange(1, len(text) - 1)], JSON_TYPE),
    "body: noise": _body(lambda _, rng: rng.randbytes(rng.randrange(1, 900_000)), YAML_TYPE),
    "body: of another type": _body(lambda text, _: text, "text/plain"),
    "body: JSON that says it is YAML": _body(
        lambda text, _: json.dumps(yaml.safe_load(text)), YAML_TYPE, Expected.HARMLESS
    ),
}
