"""The trainer on a GPU: what it computes, what it saves, and what its memory options cost and keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from episode_rows import episodes
from forge.config import CheckpointConfig, DistributedConfig, TrainerConfig, TrainingConfig
from forge.losses import chunked_logprobs, chunked_nll
from forge.models.hf_config import read_hf_config
from forge.models.tiny import make_tiny
from forge.trainer.checkpointer import Checkpointer
from forge.trainer.engine import Engine
from forge.types import Batch, Sample

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU is visible here"),
]

LOGPROB_BF16 = 0.05  # the largest difference of one token's logprob between bfloat16 and float32, at this size


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "qwen2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    make_tiny(place, family=request.param)
    return place


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    make_tiny(place)
    return place


@pytest.fixture
def engine_of() -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def open_engine(
        folder: Path,
        *,
        on_gpu: bool = True,
        precision: str = "bfloat16",
        head_precision: str | None = None,
        keep: Path | None = None,
        **training: Any,
    ) -> Engine:
        for engine in opened:
            engine.close()
        opened.clear()
        config = TrainerConfig(
            model=read_hf_config(folder).model_copy(update={"path": str(folder), "head_precision": head_precision}),
            training=TrainingConfig.model_validate(
                {"max_seq_len": 256, "learning_rate": 1e-3, "schedule": "constant", **training}
            ),
            distributed=DistributedConfig.model_validate({"precision": precision, "with_gpus": on_gpu}),
            checkpoint_dir=keep,
            checkpointing=CheckpointConfig(),
        )
        opened.append(Engine(config))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def batch_of(num_samples: int = 12, *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num_samples):
        length = int(torch.randint(2, 200, (), generator=generator))
        weights = (torch.rand(length, generator=generator) < 0.7).float()
        weights[0] = 0
        samples.append(Sample(torch.randint(0, 512, (length,), generator=generator), weights, {}, f"sample {index}"))
    return Batch.of(samples)


def reference_logprobs(folder: Path, batch: Batch) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for sample in batch.samples():
            logits = model(sample.token_ids[None]).logits[0].log_softmax(-1)
            picked = logits[:-1].gather(1, sample.token_ids[1:, None])[:, 0]
            found.append(torch.cat([torch.zeros(1), picked]))
    return found


@pytest.mark.parametrize(("precision", "bound"), [("float32", 2e-4), ("bfloat16", LOGPROB_BF16)])
def test_logprobs_are_those_of_transformers(
    folder: Path, engine_of: Callable[..., Engine], precision: str, bound: float
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = batch_of()
    ours = engine_of(folder, precision=precision).forward_logprobs(batch)
    difference = (torch.cat(ours) - torch.cat(reference_logprobs(folder, batch))).abs()
    assert difference.mean() < bound / 4
    if precision == "float32" or "moe" not in folder.name:  # a rounded router sends a few tokens to other experts
        assert difference.max() < bound


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", LOGPROB_BF16)])
def test_samples_in_one_row_are_as_if_each_had_its_own(
    tiny: Path, engine_of: Callable[..., Engine], precision: str, bound: float
) -> None:
    """Packed, alone, and with the same samples in another order: attention never reaches a neighbour."""
    torch.backends.cuda.matmul.allow_tf32 = False
    engine, samples = engine_of(tiny, precision=precision, microbatch_tokens=4096), list(batch_of().samples())
    packed = engine.forward_logprobs(Batch.of(samples))
    alone = [engine.forward_logprobs(Batch.of([sample]))[0] for sample in samples]
    turned = engine.forward_logprobs(Batch.of(samples[::-1]))[::-1]
    for other in (alone, turned):
        assert (torch.cat(other) - torch.cat(packed)).abs().max() < bound


def test_logits_in_float32_are_nearer_to_transformers(tmp_path: Path, engine_of: Callable[..., Engine]) -> None:
    """On a model whose logits are about 30, as those of trained models are."""
    make_tiny(tmp_path, tie_embeddings=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] += 0.1
    tensors["lm_head.weight"] += 30 / tensors["lm_head.weight"].shape[1]
    save_file(tensors, file, metadata={"format": "pt"})
    batch = batch_of()
    right = torch.cat(reference_logprobs(tmp_path, batch))

    def distance(head_precision: str | None) -> tuple[float, float]:
        engine = engine_of(tmp_path, head_precision=head_precision)
        return float((torch.cat(engine.forward_logprobs(batch)) - right).abs().mean()), engine.train_step(batch).loss

    rounded, wide = distance(None), distance("float32")
    assert wide[0] < 0.5 * rounded[0]
    assert wide[1] == pytest.approx(rounded[1], rel=1e-2)


def test_a_gpu_steps_as_a_cpu_does(folder: Path, engine_of: Callable[..., Engine]) -> None:
    batch = batch_of()
    on_cpu = result_of(engine_of(folder, on_gpu=False, precision="float32"), batch)
    on_gpu = result_of(engine_of(folder, precision="float32"), batch)
    half = result_of(engine_of(folder, precision="bfloat16"), batch)
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
    assert half == pytest.approx(on_cpu, rel=3e-2)


def result_of(engine: Engine, batch: Batch) -> tuple[float, float]:
    result = engine.train_step(batch)
    return result.loss, result.grad_norm


@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"activation_offload": True},
        {"microbatch_tokens": 300},
        {"head_chunk_tokens": 64},
        {"compile": True},
    ],
    ids=lambda options: next(iter(options)) + "_" + str(next(iter(options.values()))),
)
def test_options_of_memory_change_no_result(
    tiny: Path, engine_of: Callable[..., Engine], options: dict[str, Any]
) -> None:
    batch = batch_of()
    plain = result_of(engine_of(tiny, microbatch_tokens=4096), batch)
    changed = result_of(engine_of(tiny, **{"microbatch_tokens": 4096, **options}), batch)
    assert changed == pytest.approx(plain, rel=2e-2)


def groups_of(num_groups: int = 3, size: int = 4, *, seed: int = 0) -> Batch:
    """Samples that begin alike, as the completions of one prompt do."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for group in range(num_groups):
        prompt = torch.randint(0, 512, (30 + 40 * group,), generator=generator)
        for _ in range(size):
            own = torch.randint(0, 512, (int(torch.randint(5, 90, (), generator=generator)),), generator=generator)
            weights = torch.cat([torch.zeros(len(prompt)), torch.ones(len(own))])
            samples.append(Sample(torch.cat([prompt, own]), weights))
    return Batch.of(samples)


@pytest.mark.parametrize(
    "batch", [groups_of(), episodes(3, vocab=512, groups=[(5, 9, 2), (12,)])], ids=["groups", "trees"]
)
@pytest.mark.parametrize("options", [{}, {"compile": True}, {"microbatch_tokens": 500}], ids=str)
def test_beginnings_that_are_computed_once_change_no_result(
    tiny: Path, engine_of: Callable[..., Engine], batch: Batch, options: dict[str, Any]
) -> None:
    whole = engine_of(tiny, microbatch_tokens=4096)
    apart = torch.cat(whole.forward_logprobs(batch)), *result_of(whole, batch)
    sharing = engine_of(tiny, **{"microbatch_tokens": 4096, "share_prefixes": True, **options})
    together = torch.cat(sharing.forward_logprobs(batch)), *result_of(sharing, batch)
    assert (together[0] - apart[0]).abs().max() < LOGPROB_BF16
    assert together[1:] == pytest.approx(apart[1:], rel=2e-2)


def test_checkpointing_and_offload_save_memory(tiny: Path, engine_of: Callable[..., Engine]) -> None:
    batch = Batch.of([sample for seed in range(30) for sample in batch_of(seed=seed).samples()])

    def peak(**options: Any) -> int:
        engine = engine_of(tiny, microbatch_tokens=65536, **options)
        engine.train_step(batch)
        torch.cuda.reset_peak_memory_stats()
        engine.train_step(batch)
        return int(torch.cuda.max_memory_allocated())

    plain = peak()
    assert peak(activation_checkpointing="full") < 0.7 * plain
    assert peak(activation_offload=True) < 0.7 * plain


def test_masters_stay_float32_and_states_may_be_half(tiny: Path, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(tiny, optimizer_dtype="bfloat16")
    first = engine.train_step(batch_of()).loss
    for _ in range(20):
        last = engine.train_step(batch_of()).loss
    assert last < 0.8 * first
    assert {parameter.dtype for parameter in engine.own_parameters().values()} == {torch.float32}
    assert engine.optimizer is not None
    states = engine.optimizer.state_dict()
    assert {state.dtype for kind in ("exp_avg", "exp_avg_sq") for state in states[kind].values()} == {torch.bfloat16}


def test_a_run_goes_on_from_its_checkpoint(tiny: Path, tmp_path: Path, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(tiny, keep=tmp_path)
    checkpointer = Checkpointer(engine)
    for seed in range(3):
        engine.train_step(batch_of(seed=seed))
    checkpointer.save(extra={"seed": 3})
    expected = [engine.train_step(batch_of(seed=seed)).loss for seed in range(3, 6)]
    checkpointer.close()
    engine = engine_of(tiny, keep=tmp_path)
    checkpointer = Checkpointer(engine)
    assert checkpointer.load("must") == {"seed": 3}
    again = [engine.train_step(batch_of(seed=seed)).loss for seed in range(3, 6)]
    checkpointer.close()
    assert again == pytest.approx(expected, rel=1e-5)


def test_the_exported_folder_is_what_was_trained(tiny: Path, tmp_path: Path, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(tiny)
    engine.train_step(batch_of())
    Checkpointer(engine).export(tmp_path / "out", dtype="float32")
    ours = engine.forward_logprobs(batch_of(seed=1))
    for mine, theirs in zip(ours, reference_logprobs(tmp_path / "out", batch_of(seed=1)), strict=True):
        assert (mine - theirs).abs().max() < LOGPROB_BF16


def test_the_chunked_head_never_holds_all_logits() -> None:
    tokens, vocab, width = 4096, 151_936, 256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocab, width, device="cuda") * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total, _ = chunked_nll(hidden, weight, targets, torch.ones(tokens, device="cuda"), chunk_tokens=256)
    total.backward()
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < tokens * vocab * 2 / 2, "half of the logits in bfloat16"
    logprobs, _ = chunked_logprobs(hidden, weight, targets, chunk_tokens=256)
    naive = (hidden.float() @ weight.float().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (logprobs - naive).abs().max() < 0.1
    assert float(total.detach()) == pytest.approx(-float(naive.detach().sum()), rel=1e-3)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize(("tokens", "vocab"), [(37, 5003), (1, 100), (300, 4096), (0, 64)])
def test_the_kernel_of_the_head_differentiates(dtype: torch.dtype, bound: float, tokens: int, vocab: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 64, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(vocab, 64, device="cuda", generator=generator).to(dtype)
    targets = torch.randint(0, vocab, (tokens,), device="cuda", generator=generator)
    counts = torch.rand(tokens, device="cuda", generator=generator)

    def gradients(loss_of: Callable[..., torch.Tensor], wide: bool) -> list[torch.Tensor]:
        inputs = [(tensor.double() if wide else tensor).clone().requires_grad_() for tensor in (hidden, weight)]
        loss = loss_of(*inputs)
        loss.backward()
        return [loss.detach().double()[None], *(tensor.grad.double() for tensor in inputs)]

    def naive(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return -((h @ w.T).log_softmax(-1).gather(1, targets[:, None])[:, 0] * counts.double()).sum()

    def ours(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return chunked_nll(h, w, targets, counts, chunk_tokens=16)[0]

    def by_logprobs(h: torch.Tensor, w: torch.Tensor, room: int = 0) -> torch.Tensor:
        cache_bytes = room * vocab * dtype.itemsize
        return -(chunked_logprobs(h, w, targets, chunk_tokens=16, cache_bytes=cache_bytes)[0] * counts).sum()

    expected = gradients(naive, wide=True)
    ways = [ours, *(partial(by_logprobs, room=room) for room in (0, 20, tokens))]
    for found in (gradients(way, wide=False) for way in ways):
        for mine, right in zip(found, expected, strict=True):
            assert mine.shape == right.shape
            if mine.numel():
                assert (mine - right).abs().max() <= bound * right.abs().max()


@pytest.mark.parametrize(
    ("entropy", "room"),
    [(False, 0), (False, 200), (False, 600), (True, 0)],
    ids=["one kernel", "some", "all", "several"],
)
def test_the_head_in_float32_rounds_nothing(entropy: bool, room: int) -> None:
    """Logits of about 25, as trained models have them; with an entropy the kernel of one pass is not used."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = (torch.randn(600, 256, device="cuda", generator=generator) + 1).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(5003, 256, device="cuda", generator=generator) + 25 / 256).bfloat16().requires_grad_()
    targets = torch.randint(0, 5003, (600,), device="cuda", generator=generator)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    right = exact.gather(1, targets[:, None])[:, 0]
    chosen: Any = {"chunk_tokens": 128, "entropy": entropy, "cache_bytes": room * 5003 * 2}
    wide, found = chunked_logprobs(hidden, weight, targets, fp32_logits=True, **chosen)
    narrow, _ = chunked_logprobs(hidden, weight, targets, **chosen)
    assert (wide - right).abs().max() < 1e-3
    assert (narrow - right).abs().mean() > 20 * (wide - right).abs().mean()
    if found is not None:
        assert (found + (exact.exp() * exact).sum(-1)).abs().max() < 1e-3
    expected = torch.autograd.grad(right.sum(), [hidden, weight])
    for mine, theirs in zip(torch.autograd.grad(wide.sum(), [hidden, weight]), expected, strict=True):
        assert (mine.double() - theirs.double()).abs().max() <= 0.03 * theirs.double().abs().max()


def test_a_target_outside_the_vocabulary_shows_as_nan() -> None:
    hidden, weight = (torch.randn(size, 8, device="cuda") for size in (2, 10))
    logprobs, _ = chunked_logprobs(hidden, weight, torch.tensor([3, 10], device="cuda"))
    assert logprobs.isnan().tolist() == [False, True]
