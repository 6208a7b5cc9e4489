"""A game of TextArena that fails in all ways, and an opponent. It runs where TextArena is installed."""

from __future__ import annotations

import os
import random
import re
import sys
from typing import Any

import textarena
from textarena.envs.registration import register


class Troubled(textarena.Env):  # type: ignore[misc]
    """Goes on until a word makes it fail."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        self.state = textarena.SinglePlayerState(num_players=num_players, seed=seed, max_turns=9)
        self.state.reset(game_state={}, player_prompt_function=lambda **_: "Say something.")

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if action == "crash":
            os._exit(3)
        while action == "hang":
            pass
        text = "na " * 2_000_000 if action == "flood" else f"You said {action}."
        sys.stdout.write(text)
        self.state.add_observation(text, textarena.ObservationType.GAME_MESSAGE)
        if action == "violation":
            self.state.set_outcome(reward=float("nan"), reason="Over.")
        if action == "no reward":
            self.state.done = True
        done, info = self.state.step()
        return done, info


register("Troubled-v0", Troubled)


def first_move(text: str, rng: random.Random) -> str:
    """Take the first square that is free."""
    return re.findall(r"\[\d\]", text.rpartition("Available Moves")[2])[0]
