"""What is done instead of code of `transformers` and TorchTitan that imports far more than a run needs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.config import ModelConfig
from forge.models.architecture import complete
from forge.models.tiny import make_tiny
from forge.models.tokenizer import _CLASSES, ChatTokenizer

AFTER_TOKENIZER = """
import sys
from forge.models.tokenizer import ChatTokenizer
loaded = ChatTokenizer.load(sys.argv[1])
assert loaded.encode_rendered("7")
assert "torch" not in sys.modules
"""
AFTER_ENGINE = """
import sys
import forge.trainer.engine
loaded = {"torch._inductor.compile_fx", "datasets", "pandas"} & set(sys.modules)
assert not loaded, loaded
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.models.common.attention import FlexAttention
assert FlexAttention._compiled_flex_attn.__wrapped__ is flex_attention
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light") / "tiny"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return folder


def run(program: str, *arguments: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_tokenizer_is_loaded_without_torch(tiny: Path) -> None:
    run(AFTER_TOKENIZER, str(tiny))


def test_a_trainer_is_imported_without_the_compiler() -> None:
    run(AFTER_ENGINE)


@pytest.mark.parametrize(
    ("family", "name"), [*_CLASSES, ("qwen2", "PreTrainedTokenizerFast"), ("gpt2", "GPT2Tokenizer")]
)
def test_the_class_is_the_one_that_auto_tokenizer_chooses(tiny: Path, family: str, name: str) -> None:
    from transformers import AutoTokenizer

    change(tiny / "config.json", model_type=family)
    change(tiny / "tokenizer_config.json", tokenizer_class=name)
    assert type(ChatTokenizer.load(tiny)._tokenizer) is type(AutoTokenizer.from_pretrained(tiny))


def change(path: Path, **values: str) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("preset", "layout"),
    [
        ("tiny", {}),
        ("tiny", {"tensor_parallel_degree": 2}),
        ("qwen3_30b_a3b", {}),
        ("qwen3_30b_a3b", {"tensor_parallel_degree": 2, "enable_sequence_parallel": True}),
        ("qwen3_30b_a3b", {"expert_parallel_degree": 2}),
    ],
)
def test_a_model_is_split_as_torchtitan_splits_it(preset: str, layout: dict[str, Any]) -> None:
    from forge.models.language_model import titan_config  # isort: skip
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.qwen3.model import Qwen3Model

    from forge.trainer.assembly import _TitanView

    ours = titan_config(complete(ModelConfig(preset=preset)), max_seq_len=64)
    theirs = copy.deepcopy(ours)
    view = _TitanView(ParallelismConfig(**layout, spmd_backend="partial_dtensor"))
    ours.update_from_config(config=view)
    Qwen3Model.Config.update_from_config(theirs, config=view)
    theirs.lm_head.sharding_config = ours.lm_head.sharding_config  # the one difference that is meant
    assert ours == theirs
    assert ours.layers[0].attention.sharding_config is not None
