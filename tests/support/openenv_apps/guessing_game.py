"""A game on OpenEnv's own server framework: guess a number. It runs in OpenEnv's venv; some comments make it fail."""

from __future__ import annotations

import datetime
import os
import random
import threading
from typing import Any

import without_gradio  # noqa: F401 - before OpenEnv
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field, field_validator


class Guess(Action):
    """Guess the number. You are told whether it is higher or lower."""

    guess: int = Field(ge=1, le=8, description="Your guess.")
    comment: str = Field(default="", description="What you think.")
    day: datetime.date | None = None

    @field_validator("guess")
    @classmethod
    def _not_seven(cls, guess: int) -> int:
        if guess == 7:
            raise ValueError("seven is forbidden here")
        return guess


class Hint(Observation):
    hint: str
    num_left: int


class GuessingGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state, self._secret = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._state = State(episode_id=episode_id, step_count=0)
        self._secret = options.get("secret") or random.Random(seed).randint(1, 6)
        if options.get("broken_reset"):
            raise RuntimeError("the board is missing")
        return Hint(hint="Guess a number from 1 to 8.", num_left=3)

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:  # type: ignore[override]
        self._state.step_count += 1
        if action.comment == "crash":
            os._exit(13)
        if action.comment == "hang":
            threading.Event().wait()
        if action.comment == "flood":
            return Hint(hint="na " * 5_000_000, num_left=1)
        if action.comment == "long":
            return Hint(hint="na " * 50_000, num_left=1)
        if action.comment == "violation":
            return Hint.model_construct(hint=["not", "text"], num_left="few")
        if action.comment == "nan":
            return Hint(hint="", num_left=0, reward=float("nan"))
        if action.comment == "raise":
            raise RuntimeError("the dice are gone")
        num_left = 3 - self._state.step_count
        if action.guess == self._secret:
            return Hint(hint="Right!", num_left=num_left, reward=1.0, done=True)
        hint = "higher" if action.guess < self._secret else "lower"
        return Hint(hint=hint, num_left=num_left, reward=0.0 if num_left else -1.0, done=not num_left)

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessingGame, Guess, Hint, max_concurrent_envs=int(os.environ.get("MAX_SESSIONS", "64")))
