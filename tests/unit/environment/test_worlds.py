"""The environments that come along: the same seed is the same episode, and only a policy that reads what it is told wins."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.environment.base import Observation
from services.environment.registry import World, available, make

SEEDED = (World.GUESS_NUMBER, World.CALCULATOR)
"""Those that make a task of every seed."""


def play(name: str, config: dict[str, Any], seed: int, policy: Callable[[list[str]], str]) -> Observation:
    """Plays an episode; the policy sees all messages so far."""
    environment = make(name, config)
    said = environment.reset(seed, {})
    heard: list[str] = []
    while not said.done:
        heard += [message.content for message in said.messages]
        said = environment.step(policy(heard))
    environment.close()
    return said


def halve(heard: list[str]) -> str:
    """Guesses the middle of what is left."""
    left = numbers(heard[-1])
    return str(left[len(left) // 2])


def numbers(text: str) -> list[int]:
    return list(map(int, re.findall(r"\d+", text)))


def test_a_policy_that_halves_the_range_wins_every_game() -> None:
    games = [play(World.GUESS_NUMBER, {}, seed, halve) for seed in range(200)]
    assert {game.reward for game in games} == {game.accuracy for game in games} == {1.0}


def test_a_policy_that_does_not_listen_wins_at_most_its_guesses_over_the_width() -> None:
    def wins(offsets: tuple[int, ...]) -> float:
        def blind(heard: list[str]) -> str:
            return str(numbers(heard[0])[0] + offsets[len(heard) - 1])

        return sum(play(World.GUESS_NUMBER, {"numbers": [5, 11]}, seed, blind).reward or 0.0 for seed in range(70)) / 70

    best = max(wins(offsets) for offsets in permutations(range(7), 3) if offsets == tuple(sorted(offsets)))
    assert best <= 3 / 7 + 0.15, "of 70 games, and never what one that listens wins"


def test_every_number_of_the_range_is_drawn_as_often() -> None:
    drawn = [play(World.GUESS_NUMBER, {"numbers": [5, 11]}, seed, lambda _: "no").detail for seed in range(1400)]
    counts = {detail: drawn.count(detail) for detail in set(drawn)}
    assert len(counts) == 7
    assert all(140 < count < 260 for count in counts.values()), counts


def test_what_is_said_leaves_over_what_may_still_be_the_number() -> None:
    environment = make(World.GUESS_NUMBER, {"numbers": [5, 11], "guesses": 7})
    said = environment.reset(4, {}).messages[0].content
    assert numbers(said) == [5, 6, 7, 8, 9, 10, 11]
    left = {5, 6, 7, 8, 9, 10, 11}
    for guess in (5, 11, 6, 99):
        observation = environment.step(str(guess))
        if observation.done:
            break
        word, _, rest = observation.messages[0].content.partition(": ")
        left = {number for number in left if (number > guess) is (word == "higher")} - {guess}
        assert set(numbers(rest)) == left


@pytest.mark.parametrize("name", SEEDED)
def test_held_out_tasks_are_never_those_of_training(name: str) -> None:
    begun = {
        part: {make(name, {"part": part}).reset(seed, {}).messages for seed in range(400)}
        for part in ("train", "held_out")
    }
    assert not begun["train"] & begun["held_out"]
    assert min(map(len, begun.values())) > 10


@pytest.mark.parametrize("reply", ["", "four", "4 5", "-4", "4.0", "٤" * 9, "1" * 400])
def test_what_is_no_number_is_a_lost_guess_and_nothing_else(reply: str) -> None:
    game = play(World.GUESS_NUMBER, {}, 3, lambda _: reply)
    assert (game.reward, game.accuracy) == (0.0, 0.0)


def test_a_policy_that_asks_the_calculator_and_repeats_its_answer_is_right() -> None:
    def asks(heard: list[str]) -> str:
        return f"calc: {heard[0].removesuffix('?')}" if len(heard) == 1 else heard[-1]

    games = [play(World.CALCULATOR, {"digits": 3}, seed, asks) for seed in range(50)]
    assert {game.reward for game in games} == {1.0}
    assert play(World.CALCULATOR, {}, 1, lambda _: "7").reward == 0.0
    assert play(World.CALCULATOR, {}, 1, lambda _: "calc: 1*1").detail == "the calculator was used too often"
    assert play(World.CALCULATOR, {}, 1, lambda _: "who knows").reward == 0.0


def test_the_calculator_answers_as_a_tool() -> None:
    environment = make(World.CALCULATOR, {})
    environment.reset(1, {})
    (message,) = environment.step("calc: 12*12").messages
    assert (message.role, message.content) == ("tool", "144")


@pytest.mark.parametrize("name", SEEDED)
def test_the_same_seed_begins_alike_and_others_do_not(name: str) -> None:
    begun = [make(name, {}).reset(seed, {}) for seed in (1, 1, *range(2, 40))]
    assert begun[0] == begun[1]
    assert len({observation.messages for observation in begun}) > 20


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("guess_number", {"width": 1}, "environment guess_number refuses its config: ValueError: width must be 2 to 100, not 1"),
        ("guess_number", {"guesses": 9}, "guesses must be 1 to width, 7, not 9"),
        ("guess_number", {"numbers": [9, 14]}, "numbers must be two of 0 to 999999, with width, 7, from one to the other, not (9, 14)"),
        ("guess_number", {"with": 7}, "TypeError"),
        ("guess_number", {"part": "test"}, "part must be all, train or held_out, not 'test'"),
        ("guess_number", {"numbers": [1, 7], "part": "held_out"}, "no 7 numbers of (1, 7) are in part held_out"),
        ("calculator", {"digits": 0}, "digits must be 1 to 9"),
        ("gess_number", {}, "there is no environment 'gess_number'"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_setting_is_named(name: str, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match="environment") as refused:
        make(name, config)
    assert said in str(refused.value)


def test_all_that_come_along_are_offered() -> None:
    assert available()[: len(World)] == list(World)
