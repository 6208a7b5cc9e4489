"""One process for trainer and generator: when they can compute with the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge.config import GeneratorConfig
from forge.loops.colocated import can_share


@pytest.mark.parametrize(
    ("kept_in", "fields", "expected"),
    [
        (torch.float32, {}, True),
        (torch.float32, {"precision": "float32"}, True),
        (torch.bfloat16, {"precision": "bfloat16"}, True),
        (torch.float32, {"precision": "bfloat16"}, False),
        (torch.bfloat16, {}, False),
        (torch.float32, {"with_gpus": True, "precision": "float32"}, False),
    ],
)
def test_weights_are_shared_in_one_precision_on_one_device(
    kept_in: torch.dtype, fields: dict[str, Any], expected: bool
) -> None:
    parameters = {"weight": torch.zeros(2, dtype=kept_in), "norm.weight": torch.zeros(1, dtype=kept_in)}
    assert can_share(GeneratorConfig(**fields), parameters) is expected


def test_one_parameter_of_another_precision_is_enough() -> None:
    parameters = {"weight": torch.zeros(2), "norm.weight": torch.zeros(1, dtype=torch.float64)}
    assert not can_share(GeneratorConfig(precision="float32"), parameters)
