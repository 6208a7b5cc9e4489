"""The model that trainer and generator share: TorchTitan's decoder, taking packed rows and returning logprobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import forge.models.titan_setup  # noqa: F401

# isort: split
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.common.linear import Linear
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.sharding import ShardingConfig

from forge.models.linear import rows_linear
from forge.models.rows import RowBook, RowTask

HeadFunction = Callable[[Tensor, Tensor, RowTask, Any], Any]
"""(hidden [N, D], weight [V, D], row, tensor parallel group or None) -> what the model returns for a row.

With a group, `weight` is this rank's part of the vocabulary, and the gradient of `hidden` is to be this rank's part of
the sum."""


class Head(Linear):  # type: ignore[misc]
    """The output layer. It never makes logits for a whole row: a `HeadFunction` turns hidden states into logprobs.

    Without a function it returns the logits [1, L, V], which only tests and small models can afford.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):  # type: ignore[misc]
        pass

    function: HeadFunction | None = None

    def forward(self, input: Tensor, row: RowTask) -> Any:
        weight, group = self.weight, None
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group("tp")
            weight = weight.to_local()
        if isinstance(input, DTensor):
            everywhere = input.redistribute(placements=[Replicate()])
            input = everywhere.to_local(grad_placements=[Partial()])
        if self.function is None:
            return rows_linear(input, weight)
        return self.function(input[0].index_select(0, row.index), weight, row, group)


class LanguageModel(Qwen3Model):  # type: ignore[misc]
    """A decoder for Qwen3, Qwen3-MoE and Llama 3: they differ in what their layers' configurations hold.

    `forward` takes tokens [1, L] (or, in a later stage of a pipeline, hidden states) and the key of a row in `book`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):  # type: ignore[misc]
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            # The head takes what the norm gives and keeps its part of the vocabulary to itself.
            self.lm_head.sharding_config = ShardingConfig(state_shardings=self.lm_head.sharding_config.state_shardings)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.book = RowBook()

    def use(self, book: RowBook, function: HeadFunction | None) -> None:
        """Share one book of rows with the attention of every layer, and say what the head computes."""
        for module in self.modules():
            if hasattr(module, "book"):
                module.book = book
        if self.lm_head is not None:
            self.lm_head.function = function

    def forward(self, tokens: Tensor, key: Tensor) -> Any:
        row = self.book.find(key)
        hidden = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            hidden = layer(hidden, key, row.positions)
        if self.norm is not None:
            hidden = self.norm(hidden)
        return self.lm_head(hidden, row) if self.lm_head is not None else hidden
