"""A single-player game of TextArena, a package of its own (`pip install "millrace[textarena]"`). Its last reward is the episode's.

The policy reads what the game says after each move, and never again what it has read before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from services.common.errors import ConfigError, did_you_mean
from services.environment.base import Message, Observation
from services.environment.worlds.settings import require_text

INSTALL = 'pip install "millrace[textarena]"'
PLAYER = 0


@dataclass
class TextArena:
    """The game is one of TextArena's names, for example `FrozenLake-v0`."""

    game: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """The game's own, beyond those of its name: `{"size": 5}`."""
    _game: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Raises ConfigError where the package is missing or has no such game, and ValueError where it cannot be played here."""
        require_text("game", self.game)
        if not isinstance(self.settings, dict):
            raise ValueError(f"settings must be an object, not {self.settings}")  # noqa: TRY004  as of any other wrong value
        require_playable(self.game, json.dumps(self.settings))

    def reset(self, seed: int, task: Mapping[str, Any]) -> Observation:  # noqa: ARG002  an `Environment`
        """Begins a game: it draws from Python's own generator."""
        self._game = begin(self.game, self.settings, seed)
        return Observation((Message("user", self._news()),))

    def step(self, reply: str) -> Observation:
        """A move, or what the game takes for none."""
        done, _ = self._game.step(action=reply)
        if not done:
            return Observation((Message("user", self._news()),))
        rewards, info = self._game.close()
        reward = float(rewards[PLAYER])
        reason = str(info.get(PLAYER, {}).get("reason") or "")
        return Observation(done=True, reward=reward, accuracy=min(max(reward, 0.0), 1.0), detail=reason)

    def close(self) -> None:
        """Has nothing to close."""

    def _news(self) -> str:
        """What the game has said since the last move; wrappers would repeat all that was said before."""
        inner = self._game
        while isinstance(inner, package().Wrapper):
            inner = inner.env
        _, said = inner.get_observation()
        news = [text.strip() for _, text, kind in said if kind.name != "PLAYER_ACTION"]
        return "\n\n".join(filter(None, news)) or "(the game says nothing)"


@cache
def package() -> ModuleType:
    """TextArena, without downloads of word lists. Raises ConfigError where it is not installed."""
    try:
        nltk, textarena = import_module("nltk"), import_module("textarena")
    except ModuleNotFoundError as error:
        raise ConfigError(f"textarena is not installed where the environment service runs: {INSTALL}") from error
    nltk.download = _no_download  # type: ignore[attr-defined]
    return textarena


@cache
def require_playable(game: str, settings: str) -> None:
    """Begins a game once in a process, and raises ConfigError or ValueError where that fails. `settings`: as JSON."""
    known = package().envs.registration.ENV_REGISTRY
    if game not in known:
        raise ConfigError(f"game: TextArena has no game {game!r}{did_you_mean(game, known)}")
    try:
        begin(game, json.loads(settings), seed=0)
    except LookupError as error:  # of NLTK
        needs = f"game: {game} needs word lists of NLTK, which are not on this machine and are never downloaded here"
        raise ValueError(f"{needs}: the operator puts them where NLTK_DATA says") from error
    except AssertionError as error:
        raise ValueError(f"game: {game} is not for one player: {error}") from error
    except TypeError as error:
        raise ValueError(f"settings: {game} refuses them: {error}") from error
    except Exception as error:
        raise ValueError(f"game: {game} cannot begin: {type(error).__name__}: {error}") from error


def begin(game: str, settings: Mapping[str, Any], seed: int) -> Any:  # noqa: ANN401  an untyped package's
    """A game with its first words. Raises whatever the game raises."""
    made = package().make(game, **settings)
    made.reset(num_players=1, seed=seed)
    return made


def _no_download(*_: object, **__: object) -> bool:
    """In place of NLTK's, which games call at each start: a process that is killed at any time fetches nothing."""
    return False


ENVIRONMENT = TextArena
