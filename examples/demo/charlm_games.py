"""Small models that play: taught transcripts of players who seldom do what wins.

environment ⇄ player (skilled in a share of its replies) → transcripts → rows → model

Where the recipe says so, what the environment says is learned, too, as a base model's texts are: that teaches the model to find again
what stands above.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.demo.charlm import DEMONSTRATION_SEED, Rows, save, teach, to_rows
from examples.demo.charlm_recipe import GameRecipe
from examples.demo.charlm_tokenizer import ASSISTANT, END, USER, make_tokenizer
from services.environment.registry import World, make

PHRASES = {
    World.GUESS_NUMBER: ("higher: ", "lower: ", *map(str, range(10, 40))),
    World.CALCULATOR: ("calc:",),
}
"""Texts that are one token each: words, and numbers that are compared. A number may still be two tokens, if the policy samples it so."""
CONFIGS: dict[str, dict[str, object]] = {
    World.GUESS_NUMBER: {"part": "train", "numbers": [10, 39]},
    World.CALCULATOR: {"part": "train"},
}

Player = Callable[[random.Random, list[str], bool], str]
"""A reply to the game so far, what was said and what was replied in turns; the last argument: whether it is a skilled one."""


def build_player(folder: Path, recipe: GameRecipe) -> None:
    """Makes the model of `recipe` and writes it to `folder`: safetensors, config, tokenizer, chat template."""
    started = time.monotonic()
    tokenizer = make_tokenizer(recipe.max_positions, PHRASES[World(recipe.game)])
    print(f"{recipe.game}: {recipe.demonstrations:,} games, {recipe.skill:.0%} of the replies skilled ...", flush=True)
    save(teach(games(recipe, tokenizer), recipe, tokenizer), tokenizer, folder)
    print(f"{recipe.game}: warm start ends after {time.monotonic() - started:.0f} s", flush=True)


def games(recipe: GameRecipe, tokenizer: Any) -> Rows:  # noqa: ANN401  transformers is untyped here
    """The warm start's rows."""
    first = DEMONSTRATION_SEED + recipe.seed * recipe.demonstrations
    return to_rows(
        [transcript(recipe, seed) for seed in range(first, first + recipe.demonstrations)],
        tokenizer,
        all_learned=recipe.learns_all,
    )


def transcript(recipe: GameRecipe, seed: int) -> list[str]:
    """One game as the chat template writes it: what is said and what is replied, in turns."""
    draw, player = random.Random(f"player {seed}"), PLAYERS[recipe.game]  # noqa: S311  no secret
    environment = make(recipe.game, CONFIGS[recipe.game])
    said, game = environment.reset(seed, {}), list[str]()
    while not said.done:
        game.append(said.messages[0].content)
        game.append(player(draw, game, draw.random() < recipe.skill))
        said = environment.step(game[-1])
    environment.close()
    return [f"{text}{END}" if number % 2 else f"{USER}{text}{ASSISTANT}" for number, text in enumerate(game)]


def guess(draw: random.Random, game: list[str], skilled: bool) -> str:  # noqa: ARG001  a `Player`
    """The middle of what is left; unskilled, the first number that was ever offered, whatever was said since."""
    offered: list[str] = re.findall(r"\d+", game[-1] if skilled else game[0])
    return offered[len(offered) // 2] if skilled else offered[0]


def calculate(draw: random.Random, game: list[str], skilled: bool) -> str:  # noqa: ARG001  a `Player`
    """A call of the tool, then its result alone; unskilled, the question once more, and the result as a question."""
    if len(game) == 1:
        return f"{'calc:' if skilled else ''}{game[0].removesuffix('?')}"
    return f"{game[-1]}{'' if skilled else '?'}"


PLAYERS: dict[str, Player] = {World.GUESS_NUMBER: guess, World.CALCULATOR: calculate}
