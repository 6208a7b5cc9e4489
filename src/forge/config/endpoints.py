"""The address of an OpenAI-compatible endpoint that answers in place of a model."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, EnvName, broken_rule


class EndpointConfig(ConfigModel):
    """An OpenAI-compatible endpoint that answers in place of a model's folder."""

    url: str = Field(min_length=1, description="Its address, such as http://127.0.0.1:8000/v1.")
    model: str | None = Field(
        default=None, min_length=1, description="Name of the model there; null for the first one that it lists."
    )
    api_key_env: EnvName = Field(
        default="OPENAI_API_KEY",
        description="Environment variable that holds the API key. Without it, requests are sent without a key.",
    )

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if not self.url.startswith(("http://", "https://")):
            rule = "a URL that starts with http:// or https://"
            raise broken_rule(rule, repair="write it like http://127.0.0.1:8000/v1", key="url")
        return self
