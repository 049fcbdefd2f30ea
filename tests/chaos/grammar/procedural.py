"""Bad settings of procedural tasks: some that are known to be endless, and any setting of any task with a value beyond reason."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tests.chaos.grammar.draft import Draft, Expected, Part, Parts

PRIME = 1000000000000000000000000000057

KNOWN: dict[str, dict[str, Any]] = {
    "prime_factorization": {"min_value": PRIME, "max_value": PRIME},
    "maze": {"min_dist": 100_000, "max_dist": 200_000},
    "count_primes": {"min_n": 1, "max_n": 150_000_000},
    "chain_sum": {"min_digits": 20_000_000, "max_digits": 20_000_000},
    "products": {"min_digits": 5_000_000, "max_digits": 5_000_000},
    "basic_arithmetic": {"min_terms": 1_000_000, "max_terms": 1_000_000},
    "tower_of_hanoi": {"min_disks": 40, "max_disks": 60},
    "n_queens": {"n": 40, "min_remove": 1, "max_remove": 39},
    "power_function": {"min_exponent": 100_000_000, "max_exponent": 999_999_999},
    "spiral_matrix": {"min_n": 20_000, "max_n": 20_000},
    "rotate_matrix": {"min_n": 20_000, "max_n": 20_000},
    "game_of_life": {"grid_size_x": 20_000, "grid_size_y": 20_000, "simulation_steps": 1_000_000},
    "rectangle_count": {"width": 100_000, "height": 100_000},
    "palindrome_partitioning": {"min_string_len": 60, "max_string_len": 80, "max_substring_palindrome_len": 60},
    "knights_knaves": {"n_people": 24, "depth_constraint": 24, "width_constraint": 24},
    "zebra_puzzles": {"num_people": 7, "num_characteristics": 7},
    "countdown": {"min_numbers": 60, "max_numbers": 60},
    "fraction_simplification": {"min_value": 10**30, "max_value": 10**31, "min_factor": 10**30, "max_factor": 10**31},
    "lcm": {"min_numbers": 100_000, "max_numbers": 100_000, "max_value": 10**18},
    "number_sorting": {"min_numbers": 5_000_000, "max_numbers": 5_000_000},
    "futoshiki": {"min_board_size": 9, "max_board_size": 9, "min_difficulty": 3, "max_difficulty": 3},
    "word_ladder": {"min_word_length": 5, "max_word_length": 5, "min_chain_length": 200, "max_chain_length": 300},
    "rubiks_cube": {"cube_size": 200, "min_scramble_steps": 100_000, "max_scramble_steps": 100_000},
    "dice": {"num_dice": 100_000, "max_dice_size": 1_000_000},
    "ransom_note": {"max_note_length": 10_000_000, "max_magazine_length": 20_000_000},
    "jugs": {"num_jugs": 12, "difficulty": 100_000},
    "quantum_lock": {"difficulty": 1_000_000},
}
"""Tasks with settings that their own checks let through, and that take for ever, or all memory, or are refused."""

_VALUES: tuple[Any, ...] = (
    0, -1, 10**6, 10**9, 10**18, 10**30, 1e300, True, None, "9", "x" * 10**6, [], [1] * 10**5, {}, {"a": {}}, -(10**9),
)  # fmt: skip


def _known(task: str) -> Part:
    def part(draft: Draft, _: random.Random) -> None:
        source = {"source": f"reasoning_gym:{task}", "config": KNOWN[task], "size": 1000}
        draft.set("data.train", source)
        draft.untrue = "has no task"

    return part


def _any(draft: Draft, rng: random.Random) -> None:
    """One or two settings of a task that is drawn."""
    from reasoning_gym.factory import DATASETS  # takes seconds, and only this needs it

    task = rng.choice(sorted(DATASETS))
    names = [item.name for item in dataclasses.fields(DATASETS[task][1]) if item.name not in {"seed", "size"}]
    config = {name: rng.choice(_VALUES) for name in rng.sample(names, min(len(names), rng.randint(1, 2)))}
    draft.set("data.train", {"source": f"reasoning_gym:{task}", "config": config, "size": 1000})


def _unknown(draft: Draft, rng: random.Random) -> None:
    sources = (
        "reasoning_gym:",
        "reasoning_gym:nope",
        "reasoning_gym:../x",
        "reasoning_gym:chain_sum:x",
        "reasoning_gym:os.system",
    )
    draft.set("data.train", {"source": rng.choice(sources)})
    draft.expect(Expected.REFUSED)


def _own_settings(draft: Draft, rng: random.Random) -> None:
    config = rng.choice(({"seed": 1}, {"size": 10**9}, {"nope": 1}, {"__class__": 1}, {"x" * 10_000: 1}))
    draft.set("data.train", {"source": "reasoning_gym:chain_sum", "config": config})
    draft.expect(Expected.REFUSED)


PROCEDURAL: Parts = {
    **{f"procedural: {task}": _known(task) for task in KNOWN},
    **{f"procedural: any task, draw {number}": _any for number in range(1, 9)},
    "procedural: unknown task": _unknown,
    "procedural: settings that are not the task's": _own_settings,
}
