"""Samples one completion again, step by step, with weights that change where they changed before.

`NativeEngine` serves many requests on a thread of its own. Here one completion is alone, and the caller decides after
which token the weights are updated. Sampling depends on a completion's seed and positions alone, so it samples what it
did among others, as far as the model's operations give the same bits for every batch: on a CPU they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge.config import GeneratorConfig, Sampling, UpdateMode
from forge.generator.engine import Request, context_limit
from forge.generator.native.batching import Batching
from forge.generator.native.randomness import completion_seed
from forge.generator.native.sequences import PendingRequest, ScoreJob, SequenceState

if TYPE_CHECKING:
    from torch import Tensor

    from forge.models.locate import ResolvedModel
    from forge.models.tokenizer import ChatTokenizer


class Resampler:
    """The native engine without its thread, for one completion at a time.

    Args:
        config: the generator's configuration.
        model: the resolved model.
        tokenizer: decodes tokens, and names those that end a completion.
    """

    def __init__(self, config: GeneratorConfig, model: ResolvedModel, tokenizer: ChatTokenizer | None) -> None:
        limit = context_limit(config, model.architecture)
        self._batching = Batching(config, model, tokenizer=tokenizer, max_seq_len=limit, shared=None, send=_deliver_all)
        self._version = -1
        self._pending: PendingRequest | None = None

    @property
    def is_on_gpu(self) -> bool:
        """Whether it computes on a GPU."""
        return self._batching.runner.on_gpu

    def update_weights(self, tensors: Mapping[str, Tensor], *, version: int, mode: UpdateMode) -> None:
        """Load a version. The completion in progress continues as `mode` says."""
        self._batching.finish_launched()
        self._batching.runner.check_weights(tensors)
        self._batching.runner.update_weights(tensors)
        self._batching.weights_updated(mode)
        self._version = version

    def start(self, prompt_ids: Sequence[int], *, sampling: Sampling, index: int) -> SequenceState:
        """Start completion `index` of a request. The one before is dropped."""
        self.stop()
        request = Request("replay", tuple(prompt_ids), sampling.model_copy(update={"n": 1}))
        self._pending = PendingRequest(request, deliver=lambda found: None)
        self._batching.enter(self._pending)
        sequence = self._batching.scheduler.waiting[-1]
        assert sequence.row is not None
        assert sampling.seed is not None
        sequence.row.seed = completion_seed(sampling.seed, index)
        return sequence

    def run(self, sequence: SequenceState, *, num_tokens: int) -> None:
        """Sample until the completion has so many tokens, or ends."""
        assert self._pending is not None
        while sequence.num_sampled < num_tokens and not self._pending.is_over:
            self._batching.step(self._version)
            self._batching.finish_launched()
            self._batching.flush()

    def stop(self) -> None:
        """Drop the completion in progress."""
        if self._pending is not None:
            self._batching.cancel(self._pending)
            self._pending = None

    def score(self, token_ids: Sequence[int], *, temperature: float) -> list[float]:
        """Return the logprob of each token given those before it; 0 for the first."""
        found: list[list[float]] = []
        self._batching.enter_score(ScoreJob(tuple(token_ids), temperature, deliver=found.append))
        self._batching.flush()
        while not found:
            self._batching.step(self._version)
            self._batching.flush()
        return found[0]


def _deliver_all(messages: Iterable[tuple[Callable[[Any], None], Any]]) -> None:
    for deliver, found in messages:
        deliver(found)
