"""The hostile cases: each drawn from a seed of its own, so that it can be made again alone.

seed, number ─► a part that comes round in turn, sometimes a second one ─► draft ─► and what is done to the job at a random moment
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.chaos.grammar.bodies import BODIES
from tests.chaos.grammar.configs import CONFIGS
from tests.chaos.grammar.data import DATA
from tests.chaos.grammar.draft import Draft, Parts
from tests.chaos.grammar.procedural import PROCEDURAL
from tests.chaos.grammar.specs import SPECS
from tests.chaos.grammar.templates import TEMPLATES
from tests.chaos.grammar.tokenizers import TOKENIZERS
from tests.chaos.grammar.verifiers import VERIFIERS
from tests.chaos.grammar.weights import WEIGHTS

SECOND_SHARE, UNREST_SHARE = 0.25, 0.25
"""Of the cases: so many have a second bad part, and so many are meddled with."""
LATEST_S = 6.0
"""The meddling begins so soon after the submission."""


class Unrest(StrEnum):
    """What is done to a job at a random moment."""

    CANCEL = "cancelled"
    CANCEL_TWICE = "cancelled twice at once"
    PAUSE = "paused and resumed"
    PAUSE_AND_CANCEL = "paused and cancelled"
    DELETE = "deleted"
    SUBMIT_AGAIN = "submitted again, four times at once, under the same key"


def _restless(draft: Draft, _: random.Random) -> None:
    """A good job that would take a while: it is meddled with."""
    draft.set("learner.steps", 200)
    draft.endless = True


UNRESTS: Parts = {f"unrest: {unrest.value}": _restless for unrest in Unrest}
TABLES: dict[str, Parts] = {
    "tokenizer": TOKENIZERS, "template": TEMPLATES, "config": CONFIGS, "weights": WEIGHTS, "data": DATA, "procedural": PROCEDURAL,
    "verifier": VERIFIERS, "spec": SPECS, "body": BODIES, "unrest": UNRESTS,
}  # fmt: skip
ENGINE_TABLES = ("template", "config", "weights")
"""What concerns the engine or the ranks: the parts that are tried with real ones."""
_ALONE = ("body", "unrest")
"""Parts that go with no other."""
FIRST = frozenset(
    {
        "tokenizer: unknown model type", "tokenizer: truncated", "tokenizer: newer version", "template: division by zero",
        "template: long text", "template: loops", "config: heads that the engine has no kernel for", "weights: all NaN",
        "data: a line of 100 MB", "data: parquet bomb", "data: prompts of 1 MB", "data: prompts too long for the model",
        "procedural: prime_factorization", "procedural: maze", "procedural: count_primes", "procedural: chain_sum",
        "verifier: raises", "verifier: hangs", "spec: 4,096 ranks", "spec: a boolean as an integer", "spec: load from nowhere",
        "body: base-60 integers", "body: keys twice", "unrest: cancelled",
    }
)  # fmt: skip
"""What has once taken a service down, or a job's learner: a short run has these."""


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile job."""

    number: int
    seed: str
    parts: tuple[str, ...]
    unrest: Unrest | None
    unrest_s: float
    """When, after the submission."""

    def __str__(self) -> str:
        """As violations name it."""
        meddled = f", {self.unrest.value} after {self.unrest_s:.1f} s" if self.unrest else ""
        return f"case {self.number} ({' + '.join(self.parts)}{meddled})"

    def draft(self, home: Path) -> Draft:
        """Makes the job, and puts its model and files where it names them."""
        draft = Draft(home, f"hostile-{self.number}")
        for part in self.parts:
            TABLES[part.partition(":")[0]][part](draft, random.Random(f"{self.seed}:{part}"))
        return draft


def draw(seed: int, number: int, tables: Sequence[str] = tuple(TABLES)) -> Case:
    """The case of this number, from 0. Parts of these tables come round in turn: those in FIRST, each alone, then the others."""
    rng = random.Random(f"{seed}:{number}")
    order = _order(seed, [part for table in tables for part in TABLES[table]])
    parts = [order[number % len(order)]]
    table = parts[0].partition(":")[0]
    others = [name for name in tables if name not in {table, *_ALONE}]
    company = table not in _ALONE and parts[0] not in FIRST
    if others and company and rng.random() < SECOND_SHARE:
        parts.append(rng.choice(sorted(TABLES[rng.choice(others)])))
    unrest = Unrest(parts[0].partition(": ")[2]) if table == "unrest" else None
    if company and rng.random() < UNREST_SHARE:
        unrest = rng.choice(list(Unrest))
    return Case(number, f"{seed}:{number}", tuple(parts), unrest, rng.uniform(0.0, LATEST_S))


def _order(seed: int, parts: Sequence[str]) -> list[str]:
    first = [part for part in parts if part in FIRST]
    others = [part for part in parts if part not in FIRST]
    rng = random.Random(seed)
    return [*rng.sample(first, len(first)), *rng.sample(others, len(others))]
