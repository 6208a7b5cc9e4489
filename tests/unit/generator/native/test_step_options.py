"""`FORGE_DECODE_STEP`: how decode steps are computed on a GPU."""

from __future__ import annotations

import pytest

from forge.generator.native.decode_graphs import step_options
from forge.models.gpu_step import StepOptions


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("", None),
        ("fused", StepOptions()),
        ("joins=0", StepOptions(joins=False)),
        ("split=256", StepOptions(split_from=256)),
        ("split=256,prioritises=0", StepOptions(split_from=256, prioritises=False)),
        ("lt=1", StepOptions(with_lt=True)),
        ("split=128,sms=44", StepOptions(split_from=128, product_sms=44)),
    ],
)
def test_options_are_read_from_the_environment(
    word: str, options: StepOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_DECODE_STEP", word)
    assert step_options() == options
