"""The teacher of distillation: which model it is, and what scores with it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from forge.config.base import ConfigModel, PathText, broken_rule
from forge.config.endpoints import EndpointConfig
from forge.config.generator import GeneratorServiceConfig, check_fixed_weights

_OF_FORWARD_PASSES = ("num_replicas", "num_threads", "with_gpus")
_OF_ENDPOINTS = ("timeout_s", "max_requests")


class TeacherConfig(ConfigModel):
    """The teacher: a model with the student's tokenizer that says how likely tokens are. It never learns."""

    path: PathText | None = Field(default=None, description="Folder of the teacher's model.")
    generator: GeneratorServiceConfig | None = Field(
        default=None,
        description="The engine that scores with the model of `path`, `native` or `vllm`, in processes of its own. "
        "Null for forward passes in the training engine, as the reference model has them.",
    )
    endpoint: EndpointConfig | None = Field(
        default=None,
        description="An OpenAI-compatible endpoint that scores in place of `path`: its /v1/completions accepts token "
        "ids, and returns logprobs of a prompt (`echo`), as `forge serve` and vLLM do.",
    )
    num_replicas: int = Field(default=1, ge=1, description="Replicas, for forward passes.")
    num_threads: int | None = Field(
        default=None, ge=1, description="CPU threads of each replica, for forward passes; null for one."
    )
    with_gpus: bool | None = Field(
        default=None,
        description="Whether each replica gets a GPU, for forward passes; null to use one where there is one.",
    )
    timeout_s: float = Field(default=600.0, gt=0, description="Seconds that one request to the endpoint may take.")
    max_requests: int = Field(default=32, ge=1, description="Requests to the endpoint in flight at once.")

    @property
    def is_given(self) -> bool:
        """Whether there is a teacher."""
        return self.path is not None or self.endpoint is not None

    @property
    def scores_tempered(self) -> bool:
        """Whether it can divide logits by a temperature before it scores."""
        if self.endpoint is not None:
            return False
        return self.generator is None or self.generator.capabilities.scores_tempered

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.path is not None and self.endpoint is not None:
            raise broken_rule("not with path: one of them scores", repair="remove one of them", key="endpoint")
        if self.generator is not None:
            if self.path is None:
                raise broken_rule("only with path: it loads that model", repair="set teacher.path", key="generator")
            check_fixed_weights(self.generator, what="a teacher")
        return self

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        has_forward_passes = self.generator is None and self.endpoint is None
        unused = [] if has_forward_passes else [*_OF_FORWARD_PASSES]
        for key in [*unused, *([] if self.endpoint is not None else _OF_ENDPOINTS)]:
            if getattr(self, key) != type(self).model_fields[key].default:
                of_endpoint = key in _OF_ENDPOINTS
                rule = "only with endpoint" if of_endpoint else "only with path, and without generator"
                repair = "remove it" if of_endpoint else f"remove it; teacher.generator.{key} is for an engine"
                raise broken_rule(rule, repair=repair, key=key)
        return self
