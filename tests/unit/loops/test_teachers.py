"""Runs of on-policy distillation: which teachers answer what, what is refused, and that a run resumes exactly."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import EndpointConfig, GRPOConfig, InvalidConfig, TeacherConfig, load
from forge.errors import ActorFailure, ConfigError, ForgeError
from forge.loops.dry_run import dry_run
from forge.loops.planning import plan_run
from forge.loops.run_paths import run_dir
from forge.loops.teachers import engine_logprobs, engine_tops, open_endpoint, start_generators
from forge.memory import Card, plan_memory, resolve_run
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.rollout.endpoint_policy import EndpointAddress
from forge.rollout.teachers import EndpointTeacher
from forge.types import Batch, Sample
from grpo_runs import config, metrics, train_here, weights_digest
from local_services import services_here
from tiny_serving import tiny, with_tiny_served

ALONE = ("algorithm.distillation.coefficient=1", "algorithm.distillation.reward_coefficient=0", "rewards.functions=[]")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_tiny(folder, seed=5, num_layers=1)
    return folder


def taught(folder: Path, teacher: Path, *overrides: str) -> GRPOConfig:
    """A run that only a teacher teaches, one completion for each prompt. The native engine scores: one process has room
    for one trainer."""
    given = (f"teacher.path={teacher}", "teacher.generator.engine=native", "rollout.group_size=1", *ALONE)
    return config(folder, *given, *overrides)


def test_a_run_without_rewards_learns_from_its_teacher_and_resumes_exactly(teacher: Path, tmp_path: Path) -> None:
    faster = ("training.learning_rate=3e-3", "rollout.batch_groups=4")
    whole = taught(tmp_path / "whole", teacher, *faster)
    result = train_here(whole)
    assert (result.step, result.reward) == (6, 0.0)
    assert len(metrics(whole, "distillation/reverse_kl")) == 6
    assert all(map(math.isfinite, metrics(whole, "distillation/teacher_nll")))
    lines = (run_dir(whole) / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert len(record["teacher_logprobs"]) == len(record["token_ids"])

    first = taught(tmp_path / "parts", teacher, *faster, "training.max_steps=4")
    train_here(first)
    train_here(taught(tmp_path / "parts", teacher, *faster, "checkpointing.resume=must"))
    assert weights_digest(first) == weights_digest(whole)
    assert metrics(first, "distillation/reverse_kl") == metrics(whole, "distillation/reverse_kl")


def some_samples() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 500, (length,), generator=generator) for length in (7, 12)]
    return Batch.of([Sample(each, torch.cat([torch.zeros(1), torch.ones(len(each) - 1)])) for each in ids])


def test_the_engine_and_the_endpoint_say_what_a_forward_pass_says() -> None:
    from transformers import AutoModelForCausalLM

    batch = some_samples()
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    expected, likeliest = [], []
    for sample in batch.samples():
        logprobs = torch.log_softmax(model(sample.token_ids[None]).logits[0].detach(), -1)
        likeliest.append(logprobs[:-1].topk(5))
        expected.append(torch.cat([torch.zeros(1), logprobs[:-1].gather(1, sample.token_ids[1:, None])[:, 0]]))
    found: dict[str, list[torch.Tensor]] = {}
    tops: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    async def of_engine() -> None:
        section = TeacherConfig.model_validate({"path": str(tiny()), "generator": {"engine": "native"}})
        service = await start_generators(section, 64, on_gpu=False, options={})
        found["engine"] = await engine_logprobs(service)(batch, 1.0)  # type: ignore[assignment]
        tops["engine"] = await engine_tops(service)(batch, 5)
        await service.shutdown()

    async def of_endpoint(server: Any) -> None:
        endpoint = await open_endpoint(TeacherConfig(endpoint=EndpointConfig(url=server.base_url)))
        await endpoint.check(ChatTokenizer.load(tiny()))
        found["endpoint"] = await endpoint.logprobs(batch, 1.0)
        tops["endpoint"] = await endpoint.top_logprobs(batch, 5)
        with pytest.raises(ActorFailure, match="no logprobs") as caught:
            await endpoint.logprobs(Batch.of([Sample(torch.ones(9999, dtype=torch.int64), torch.ones(9999))]), 1.0)
        assert (caught.value.path, caught.value.value) == ("teacher.endpoint.url", server.base_url)
        await endpoint.close()

    with services_here():
        asyncio.run(asyncio.wait_for(of_engine(), 600))
    with_tiny_served(of_endpoint)
    for name in ("engine", "endpoint"):
        for own, other in zip(found[name], expected, strict=True):
            assert torch.allclose(own, other, atol=1e-4), name
        for (values, ids), top in zip(tops[name], likeliest, strict=True):
            assert torch.equal(ids, top.indices), name
            assert torch.allclose(values, top.values, atol=1e-4), name


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"token_logprobs": [None, -1.0], "top_logprobs": [None, {"token_id:1": -1.0}]},
        {"token_logprobs": [None, -1.0, None], "top_logprobs": [None, {"token_id:1": None}, {"token_id:2": -1.0}]},
        {"token_logprobs": [None, -1.0, "much"], "top_logprobs": [None, {"token_id:x": -1.0}, {"token_id:2": -1.0}]},
        {"token_logprobs": {"1": -1.0}, "top_logprobs": {"1": {"token_id:1": -1.0}}},
    ],
)
def test_an_endpoint_that_gives_too_little_is_an_error_that_names_it(answer: dict[str, Any]) -> None:
    class Short(EndpointTeacher):
        async def _echo(self, token_ids: Any, *, logprobs: int = 0, **more: Any) -> dict[str, Any]:
            return answer

    async def body() -> None:
        teacher = Short(EndpointAddress("http://127.0.0.1:9/v1", "m", None, 1.0), max_requests=1)
        batch = Batch.of([Sample(torch.tensor([1, 2, 3]), torch.tensor([0.0, 1.0, 1.0]))])
        for asked in (teacher.logprobs(batch, 1.0), teacher.top_logprobs(batch, 1)):
            with pytest.raises(ActorFailure, match="gave no logprobs") as caught:
                await asked
            assert caught.value.path == "teacher.endpoint.url"
        await teacher.close()

    asyncio.run(body())


def test_an_endpoint_with_other_tokens_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "other", num_layers=1)
    file = tmp_path / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    student = ChatTokenizer.load(tmp_path / "other")

    async def body(server: Any) -> None:
        endpoint = await open_endpoint(TeacherConfig(endpoint=EndpointConfig(url=server.base_url)))
        with pytest.raises(ConfigError) as caught:
            await endpoint.check(student)
        await endpoint.close()
        assert caught.value.path == "teacher.endpoint"
        assert "is 'a' in the student, and 'b' there" in str(caught.value.rule)

    with_tiny_served(body)


WRONG = {
    "no teacher": (ALONE, "teacher.path", "a model's folder"),
    "no coefficient": (("teacher.path=x",), "algorithm.distillation.coefficient", "has no effect"),
    "both": ((*ALONE, "teacher.path=x", "teacher.endpoint.url=http://h/v1"), "teacher.endpoint", "not with path"),
    "engine without a model": ((*ALONE, "teacher.generator.engine=native"), "teacher.generator", "only with path"),
    "replicas of an engine": (
        (*ALONE, "teacher.path=x", "teacher.generator.engine=native", "teacher.num_replicas=2"),
        "teacher.num_replicas",
        "without generator",
    ),
    "a request without an endpoint": ((*ALONE, "teacher.path=x", "teacher.timeout_s=3"), "teacher.timeout_s", "only"),
    "updates": (
        (*ALONE, "teacher.path=x", "teacher.generator.weights=w"),
        "teacher.generator.weights",
        "never change",
    ),
    "temperature": (
        (*ALONE, "teacher.endpoint.url=http://h/v1", "generator.sampling.temperature=0.7"),
        "generator.sampling.temperature",
        "scores at temperature 1 only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_cannot_be_are_refused(name: str, tmp_path: Path) -> None:
    overrides, path, rule = WRONG[name]
    with pytest.raises(InvalidConfig) as caught:
        config(tmp_path / "run", *overrides)
    (problem,) = caught.value.problems
    assert problem.path == path
    assert rule in problem.rule
    assert problem.repair


def test_teachers_that_cannot_score_are_refused_before_anything_starts(teacher: Path, tmp_path: Path) -> None:
    make_tiny(tmp_path / "narrow", num_layers=1, vocab_size=512 + 128)
    student = f"model.path={tmp_path / 'narrow'}"
    cases: dict[str, tuple[tuple[str, ...], str]] = {
        "teacher.path": ((), str(tmp_path / "nowhere")),
        "rows": ((student,), str(teacher)),
        "teacher.generator.max_seq_len": (("teacher.generator.max_seq_len=32",), str(teacher)),
        "rewards.functions": (("evaluation.fraction=0.1",), str(teacher)),
    }
    for path, (overrides, folder) in cases.items():
        chosen = taught(
            tmp_path / "run", Path(folder), *(("model.preset=null",) if overrides == (student,) else ()), *overrides
        )
        with pytest.raises(ForgeError) as caught:
            plan_run(chosen)
        assert caught.value.path == ("teacher.path" if path == "rows" else path)
        assert path in [problem.path for problem in dry_run(chosen).problems] or path == "rows"


def test_a_teacher_needs_the_gpu_that_it_asks_for(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    forward = config(tmp_path / "run", f"teacher.path={teacher}", *ALONE, "teacher.with_gpus=true")
    engine = taught(tmp_path / "run", teacher, "teacher.generator.with_gpus=true")
    for chosen, path in ((forward, "teacher.with_gpus"), (engine, "teacher.generator.with_gpus")):
        (problem,) = [each for each in dry_run(chosen).problems if "needs GPUs" in each.rule]
        assert problem.path == path
        assert f"{path}=false" in str(problem.repair)


def test_a_dry_run_and_the_plan_have_the_teacher(teacher: Path, tmp_path: Path) -> None:
    chosen = taught(tmp_path / "run", teacher)
    facts = dict(dry_run(chosen).facts)
    assert facts["teacher"] == f"{teacher}, by engine native"
    assert facts["rewards"] == "none: the teacher alone"
    forward = config(tmp_path / "forward", f"teacher.path={teacher}", *ALONE, "teacher.num_replicas=2")
    card = Card(2**34, 4)
    for each, count in ((chosen, 1), (forward, 2)):
        gpus = {device.name: device for device in plan_memory(resolve_run(each, card=card), card=card).gpus}
        assert gpus["teacher"].count == count
        assert gpus["teacher"].peak.num_bytes > 0
    host = plan_memory(resolve_run(forward)).host.peak
    assert any(part.name == "teacher" for part in host.parts)
    far = load(GRPOConfig, overrides=["model.preset=tiny", "teacher.endpoint.url=http://h/v1", *ALONE])
    assert "the teacher behind its endpoint is not planned" in resolve_run(far).notes
