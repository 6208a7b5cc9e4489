"""Speculative decoding of the native engine."""

from __future__ import annotations

from pydantic import Field

from forge.config.base import ConfigModel, PathText


class SpeculationConfig(ConfigModel):
    """How the next tokens of a completion are guessed, to be computed in one step. Completions do not change."""

    model: PathText | None = Field(
        default=None,
        description="Folder of a smaller model with the same vocabulary, which guesses. Null: the tokens that followed "
        "the last `ngram` tokens where these occurred before, in the prompt or in the completion (prompt lookup).",
    )
    num_tokens: int = Field(
        default=4, ge=1, le=64, description="Most tokens that are guessed at once. After a wrong guess there are fewer."
    )
    ngram: int = Field(
        default=3, ge=1, le=32, description="Tokens that must have occurred before. It has no effect with `model`."
    )
