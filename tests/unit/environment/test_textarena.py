"""Environment `textarena` on a stand-in for the package. `make test-environments` plays the real games (tests/environments)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.environment.base import Message
from services.environment.registry import World, make
from services.environment.worlds import textarena


class Kind(Enum):
    PROMPT = auto()
    PLAYER_ACTION = auto()
    GAME_MESSAGE = auto()


class Doors:
    """Door 1 is half a win, door 2 a whole one, door 3 less than nothing; any other is another move."""

    def __init__(self, players: int = 1) -> None:
        self.players, self.said, self.reward = players, list[Any](), 0.0

    def reset(self, num_players: int, seed: int) -> None:
        assert num_players == self.players, f"The number of players has to be {self.players}"
        self.said = [(-1, f"Choose, {seed}.", Kind.PROMPT)]

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        self.said += [(-1, action, Kind.PLAYER_ACTION), (-1, " Closed. ", Kind.GAME_MESSAGE)]
        self.reward = {"[1]": 0.5, "[2]": 1.0, "[3]": -1.0}.get(action, 0.0)
        return bool(self.reward), {}

    def get_observation(self) -> tuple[int, list[Any]]:
        said, self.said = self.said, []
        return 0, said

    def close(self) -> tuple[dict[int, float], dict[int, Any]]:
        return {0: self.reward}, {0: {"reason": f"door of {self.reward}"}}


class Wrapper:
    """Adds brackets, and would repeat everything that was said."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: str) -> Any:
        return self.env.step(f"[{action}]")

    def get_observation(self) -> Any:
        raise AssertionError


def needs_words(**_: Any) -> Any:
    raise LookupError("Resource words not found")


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    games = {"Doors-v0": Doors, "Wordle-v0": needs_words, "Chess-v0": lambda: Doors(players=2)}
    made, nltk = ModuleType("textarena"), ModuleType("nltk")
    vars(made).update(Wrapper=Wrapper, envs=SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY=games)))
    vars(made).update(make=lambda game, **settings: Wrapper(games[game](**settings)))
    monkeypatch.setitem(sys.modules, "textarena", made)
    monkeypatch.setitem(sys.modules, "nltk", nltk)
    for cached in (textarena.package, textarena.require_playable):
        cached.cache_clear()
    yield made
    for cached in (textarena.package, textarena.require_playable):
        cached.cache_clear()


def test_each_message_is_what_the_game_says_anew() -> None:
    environment = make(World.TEXTARENA, {"game": "Doors-v0"})
    assert environment.reset(7, {}).messages == (Message("user", "Choose, 7."),)
    assert environment.step("9").messages == (Message("user", "Closed."),)


@pytest.mark.parametrize(("move", "reward", "accuracy"), [("1", 0.5, 0.5), ("2", 1.0, 1.0), ("3", -1.0, 0.0)])
def test_the_games_last_reward_is_the_episodes(move: str, reward: float, accuracy: float) -> None:
    environment = make(World.TEXTARENA, {"game": "Doors-v0"})
    environment.reset(7, {})
    said = environment.step(move)
    assert (said.done, said.reward, said.accuracy, said.detail) == (True, reward, accuracy, f"door of {reward}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "game: TextArena has no game ''"),
        ({"game": 7}, "game must be a text, not 7"),
        ({"game": "Dors-v0"}, "game: TextArena has no game 'Dors-v0'; did you mean Doors-v0"),
        ({"game": "Doors-v0", "settings": {"size": 3}}, "settings: Doors-v0 refuses them: "),
        ({"game": "Doors-v0", "settings": []}, "settings must be an object"),
        ({"game": "Chess-v0"}, "game: Chess-v0 is not for one player: The number of players has to be 2"),
        ({"game": "Wordle-v0"}, "game: Wordle-v0 needs word lists of NLTK, which are not on this machine and are never downloaded here"),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_refused_with_its_setting(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make(World.TEXTARENA, config)
    assert said in str(refused.value)


def test_a_game_downloads_nothing() -> None:
    make(World.TEXTARENA, {"game": "Doors-v0"})
    assert sys.modules["nltk"].download("words") is False


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r'textarena is not installed .* pip install "millrace\[textarena\]"'):
        make(World.TEXTARENA, {"game": "Doors-v0"})
