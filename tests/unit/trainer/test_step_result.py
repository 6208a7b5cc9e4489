"""What a training step reports, as it is sent to the controller."""

from __future__ import annotations

import torch

from forge.runtime.serialization import decode, encode
from forge.types import StepResult


def result_with(logprobs: tuple[torch.Tensor, ...] | None) -> StepResult:
    return StepResult(3, 0.5, 1.5, 1e-6, 10, 7, seconds=2.0, metrics={"entropy": 1.0}, logprobs=logprobs)


def test_logprobs_are_sent_as_one_tensor_and_arrive_as_one_for_each_sample() -> None:
    row = torch.randn(100_000)
    parts = row[:60].split([10, 0, 20, 30])
    data = encode(result_with(parts))
    assert len(data) < 10_000, "the memory behind the views was sent as well"
    found = decode(data)
    assert found.logprobs is not None
    assert [len(each) for each in found.logprobs] == [10, 0, 20, 30]
    assert all(torch.equal(one, other) for one, other in zip(found.logprobs, parts, strict=True))
    assert found.metrics == {"entropy": 1.0}
    assert (found.step, found.loss, found.seconds, found.skipped) == (3, 0.5, 2.0, False)


def test_results_without_logprobs_arrive_as_they_are() -> None:
    for logprobs in (None, ()):
        assert decode(encode(result_with(logprobs))) == result_with(logprobs)
