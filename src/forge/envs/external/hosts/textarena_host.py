"""The side of `forge.envs.external.textarena` that runs where TextArena is installed."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_MOST_MOVES = 1000
"""Moves of opponents in a row after which a game is stuck."""


class Refused(Exception):
    """The options are wrong."""


def prepare() -> None:
    """Import what takes long."""
    importlib.import_module("textarena")


class Host:
    """One game. The policy is one player; an opponent plays all others."""

    def __init__(self) -> None:
        self._arena: Any = importlib.import_module("textarena")
        self._env: Any = None
        self._game: Any = None
        self._seat = 0
        self._opponent: Callable[[str, random.Random], str] = _random_move
        self._rng = random.Random()
        self._seen: dict[int, list[str]] = {}

    def reset(
        self, *, env: str, make: Mapping[str, Any], seed: int, players: int, seat: int, opponent: str
    ) -> dict[str, Any]:
        """Make the game and play until it is the policy's turn."""
        registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        if ":" in env:  # a module of the user's that registers its games
            module, _, env = env.partition(":")
            importlib.import_module(module)
        if env not in registry:
            raise Refused(f"TextArena has no game {env}")
        self._seat, self._rng = seat, random.Random(seed)
        self._opponent = _random_move if opponent == "random" else _attribute(opponent)
        try:
            self._env = self._arena.make(env, **make)
        except TypeError as error:
            raise Refused(f"{env}: {error}") from error
        self._game = self._env
        while isinstance(self._game, self._arena.Wrapper):
            self._game = self._game.env
        try:
            self._env.reset(num_players=players, seed=seed)
        except AssertionError as error:  # the number of players
            raise Refused(f"{env}: {error}") from error
        return self._play_on(False)

    def step(self, *, text: str) -> dict[str, Any]:
        """Make the policy's move, then those of its opponents."""
        done, _ = self._env.step(action=text)
        return self._play_on(bool(done))

    def _play_on(self, done: bool) -> dict[str, Any]:
        """Let opponents move until it is the policy's turn, or the game is over."""
        for _ in range(_MOST_MOVES):
            if done:
                return self._over()
            player, messages = self._game.get_observation()
            text = self._text(player, messages)
            if player == self._seat:
                return {"text": text, "done": False, "reward": 0.0}
            seen = self._seen.setdefault(player, [])
            seen.append(text)
            done, _ = self._env.step(action=str(self._opponent("\n".join(seen), self._rng)))
            done = bool(done)
        raise RuntimeError(f"opponents made {_MOST_MOVES} moves in a row")

    def _over(self) -> dict[str, Any]:
        rewards, info = self._env.close()
        left = self._game.state.observations.get(self._seat, ())
        reason = (info or {}).get(self._seat, {}).get("reason") or ""
        text = "\n".join(part for part in (self._text(self._seat, left), str(reason)) if part)
        return {"text": text, "done": True, "reward": float((rewards or {})[self._seat])}

    def _text(self, player: int, messages: Any) -> str:
        """Return what a player has not read yet: all but its own moves."""
        if isinstance(messages, str):
            return messages
        names = getattr(self._game.state, "role_mapping", None) or {}
        return "\n".join(
            str(each[1]) if each[0] == self._arena.GAME_ID else f"[{names.get(each[0], each[0])}] {each[1]}"
            for each in messages or ()
            if each[0] != player
        )


def _random_move(text: str, rng: random.Random) -> str:
    """Choose one of the moves in brackets that were offered last."""
    offered = text.rpartition("vailable")[2]
    moves = _MOVE.findall(offered) or _MOVE.findall(text)
    return rng.choice(moves) if moves else "[0]"


def _attribute(name: str) -> Callable[[str, random.Random], str]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Refused(f"opponent: {name}: {type(error).__name__}: {error}") from error
    return found  # type: ignore[no-any-return]
