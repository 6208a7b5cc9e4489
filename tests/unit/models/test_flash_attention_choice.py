"""Which attention kernel a trainer takes on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from forge.errors import ConfigError
from forge.models.flash_attention import Situation, _flash_attn_4, choose_kernel, load_kernel, torch_kernel


@pytest.mark.parametrize(
    ("setting", "situation", "kernel"),
    [
        ("auto", Situation(9, True), "flash_attn_4"),
        ("auto", Situation(10, True), "flash_attn_4"),
        ("auto", Situation(8, True), "torch"),
        ("auto", Situation(12, True), "torch"),
        ("auto", Situation(9, False), "torch"),
        ("auto", Situation(9, True, saves_selectively=True), "torch"),
        ("auto", Situation(None, True), "torch"),
        ("torch", Situation(9, True), "torch"),
        ("flash_attn_4", Situation(9, True), "flash_attn_4"),
    ],
)
def test_a_kernel_is_chosen_by_setting_gpu_and_packages(setting: str, situation: Situation, kernel: str) -> None:
    assert choose_kernel(setting, situation) == kernel  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("situation", "problem", "repair"),
    [
        (Situation(None, True), "there is no GPU", "compute capability 9 or 10"),
        (Situation(8, True), "generation 8", "compute capability 9 or 10"),
        (Situation(9, False), "not installed", "pip install 'torchforge[flash-attn-4]'"),
        (Situation(9, True, saves_selectively=True), "selective", "none or full"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_by_name(situation: Situation, problem: str, repair: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        choose_kernel("flash_attn_4", situation)
    assert caught.value.path == "training.attention"
    assert caught.value.value == "flash_attn_4"
    assert repair in (caught.value.repair or "")


def test_a_cpu_is_seen_as_one() -> None:
    assert Situation.of(torch.device("cpu"), saves_selectively=False).capability is None
    assert load_kernel("torch") is torch_kernel


def test_loading_flash_attention_4_leaves_the_module_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its compiler appends a folder with a typing.py, which processes that are started later would find first."""
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text("import sys\nsys.path.append('nowhere')\ndef flash_attn_varlen_func(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "0")
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.path)
    _flash_attn_4.__wrapped__()
    assert "flash_attn.cute" in sys.modules
    assert sys.path == before
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.delitem(sys.modules, name)
