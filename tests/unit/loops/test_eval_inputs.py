"""What an evaluation takes from a run, which tasks it has, and what its settings are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.config import EvalConfig, EvalSection, EvaluationConfig, InvalidConfig, PromptsConfig, load, save
from forge.config.grpo import GRPOConfig
from forge.config.sft import SFTConfig
from forge.data.prompts import open_prompts
from forge.errors import CheckpointError, ConfigError
from forge.loops.evals import settings
from forge.loops.evals.record import SampleScore, changed_settings, task_order
from forge.loops.evals.results import summarize
from forge.loops.evals.run_defaults import load_eval, open_run
from forge.loops.evals.settings import eval_settings, folder_digest
from forge.loops.evals.tasks import open_tasks
from forge.rollout.endpoint_policy import NO_LIMIT, request_options

NUMBER = "rewards.functions=[{kind: number}]"


def run_of(folder: Path, *overrides: str) -> str:
    base = ["model.preset=tiny", "prompts.sources=[{task: arithmetic, num_prompts: 40}]"]
    save(load(GRPOConfig, overrides=[*base, *overrides]), folder)
    return str(folder)


# ---- A run's configuration


def test_a_runs_evaluation_gives_the_defaults(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        NUMBER,
        "run.seed=7",
        "evaluation={fraction: 0.25, num_samples: 4, temperature: 0.6, max_prompts: 8, solved_at: 0.5, reward: number}",
        "training.max_seq_len=128",
        "generator={max_batch: 3, update: {mode: abort}, sampling: {top_p: 0.9}}",
    )
    found = load_eval(run=run)
    assert (found.eval.run, found.eval.num_samples, found.eval.num_tasks) == (run, 4, 8)
    assert (found.eval.solved_at, found.eval.reward, found.eval.heldout_fraction) == (0.5, "number", 0.25)
    assert (found.run.seed, found.run.name) == (7, "eval")
    assert (found.generator.max_batch, found.generator.max_seq_len) == (3, 128)
    sampling = found.generator.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.6, 0.9, 64)
    assert found.generator.update.mode == "keep"  # it has no meaning here
    assert found.model.preset == "tiny"
    assert [function.kind for function in found.rewards.functions] == ["number"]
    assert open_run(run).notes == ()


def test_options_and_files_win_over_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", NUMBER, "evaluation={fraction: 0.25, num_samples: 4}")
    file = tmp_path / "eval.yaml"
    file.write_text(json.dumps({"eval": {"run": run, "num_samples": 2}, "prompts": {"template": "Say {prompt}"}}))
    found = load_eval(files=[str(file)], overrides=["run.seed=3"])
    assert (found.eval.num_samples, found.run.seed) == (2, 3)
    assert found.prompts.template == "Say {prompt}"
    assert found.prompts.sources[0].task == "arithmetic"


def test_the_held_out_tasks_are_those_of_the_run(tmp_path: Path) -> None:
    for number, held in enumerate(("{fraction: 0.25}", "{sources: [{task: arithmetic, num_prompts: 6}]}")):
        run = run_of(tmp_path / f"run-{number}", NUMBER, f"evaluation={held}", "run.seed=5")
        config = load(GRPOConfig, files=[Path(run) / "config.yaml"])
        theirs = open_prompts(config.prompts, evaluation=config.evaluation, seed=5).heldout
        assert theirs is not None
        ours = open_tasks(load_eval(run=run))
        asked = {theirs.read(index).messages[0]["content"] for index in range(len(theirs))}
        assert {ours.read(index).messages[0]["content"] for index in ours.indices} == asked


def test_what_an_evaluation_leaves_out_is_noted(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "episode={kind: 'own_episodes:dialogue', group_reward: 'own_episodes:longest_wins'}")
    assert load_eval(run=run).episode.group_reward is None
    assert load_eval(run=run).episode.kind == "own_episodes:dialogue"
    notes = open_run(run).notes
    assert any("tasks that it trained on" in note for note in notes)
    assert any("episode.group_reward is left out" in note for note in notes)


def test_another_program_takes_the_place_of_the_runs_rewards_and_other_rewards_that_of_its_program(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "scored", NUMBER)
    found = load_eval(run=run, overrides=["episode.kind=own_episodes:dialogue"])
    assert (found.episode.kind, found.rewards.functions) == ("own_episodes:dialogue", ())
    run = run_of(tmp_path / "played", "episode={kind: 'own_episodes:dialogue', args: {num_turns: 2}}")
    found = load_eval(run=run, overrides=[NUMBER])
    assert (found.episode.kind, len(found.rewards.functions)) == (None, 1)
    found = load_eval(run=run, overrides=["episode.kind=own_episodes:branching"])
    assert (found.episode.kind, dict(found.episode.args)) == ("own_episodes:branching", {})


def test_a_run_of_fine_tuning_gives_its_model_alone(tmp_path: Path) -> None:
    save(load(SFTConfig, overrides=["model.preset=tiny", "data.sources=[{path: x.jsonl}]"]), tmp_path / "run")
    found = load_eval(run=str(tmp_path / "run"), overrides=["prompts.sources=[{path: a.jsonl}]", NUMBER])
    assert found.model.preset == "tiny"
    assert found.generator.max_seq_len is None
    assert open_run(str(tmp_path / "run")).notes == ()


def test_a_run_without_weights_is_refused(tmp_path: Path) -> None:
    run = open_run(run_of(tmp_path / "run", NUMBER))
    with pytest.raises(CheckpointError, match="no checkpoint and no model"):
        run.find(None)
    (tmp_path / "run" / "checkpoints" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "hf" / "config.json").write_text("{}")
    assert run.find(None) is None
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        run.find(3)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_run(str(tmp_path / "broken"))


def test_checkpoints_elsewhere_and_their_precision(tmp_path: Path) -> None:
    run = open_run(
        run_of(tmp_path / "run", f"checkpointing.output_dir={tmp_path / 'there'}", "distributed.precision=bf16")
    )
    assert run.checkpoint_dir == tmp_path / "there"
    assert run.dtype == "bfloat16"
    assert open_run(run_of(tmp_path / "other")).dtype == "float32"


# ---- Tasks


def config_of(*overrides: str, sources: str = "[{task: arithmetic, num_prompts: 20}]") -> EvalConfig:
    return load(EvalConfig, overrides=[f"prompts.sources={sources}", *overrides])


def test_a_choice_of_tasks_depends_on_the_seed_alone() -> None:
    some = open_tasks(config_of("eval.num_tasks=5", "prompts.sources.0.seed=1"))
    again = open_tasks(config_of("eval.num_tasks=5", "prompts.sources.0.seed=1"))
    other = open_tasks(config_of("eval.num_tasks=5", "prompts.sources.0.seed=1", "run.seed=9"))
    first = open_tasks(config_of("eval.num_tasks=5", "prompts.shuffle=false"))
    assert some.indices == again.indices
    assert some.digest == again.digest
    assert set(some.indices) != set(other.indices)
    assert first.indices == (0, 1, 2, 3, 4)
    assert len(open_tasks(config_of())) == 20


def test_the_digest_is_of_the_tasks_and_of_nothing_around_them(tmp_path: Path) -> None:
    records = [{"prompt": f"Question {number}?", "answer": str(number)} for number in range(4)]
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl").write_text("".join(lines))
    (tmp_path / "c.jsonl").write_text("".join(lines).replace('"3"', '"4"'))
    digest = {name: open_tasks(config_of(sources=f"[{{path: {tmp_path / name}.jsonl}}]")).digest for name in "abc"}
    assert digest["a"] == digest["b"] != digest["c"]
    worded = config_of("prompts.system_prompt=Think.", sources=f"[{{path: {tmp_path}/a.jsonl}}]")
    assert open_tasks(worded).digest == digest["a"]
    assert open_tasks(worded).read(0).messages[0]["role"] == "system"


def test_held_out_prompts_are_a_part() -> None:
    part = open_tasks(config_of("eval.heldout_fraction=0.25"))
    held = EvaluationConfig(fraction=0.25)
    whole = open_prompts(PromptsConfig.model_validate(config_of().prompts.model_dump()), evaluation=held, seed=0)
    assert whole.heldout is not None
    assert len(part) == len(whole.heldout) == 5


# ---- Settings


def test_settings_have_what_samples_depend_on_and_nothing_else() -> None:
    tasks = open_tasks(config_of())
    base = eval_settings(config_of(NUMBER), tasks, {"kind": "model"})

    def changed(*overrides: str) -> list[str]:
        now = eval_settings(config_of(NUMBER, *overrides), tasks, {"kind": "model"})
        return [line.partition(":")[0] for line in changed_settings(base, json.loads(json.dumps(now)))]

    for free in ("eval.max_concurrent=3", "generator.num_replicas=2", "eval.solved_at=0.5", "eval.confidence=0.9"):
        assert changed(free) == []
    assert changed("eval.allow_missing=true", "rewards.num_workers=2", "generator.max_batch=2") == []
    assert changed("run.seed=1") == ["seed"]
    assert changed("eval.num_samples=2") == ["num_samples"]
    assert changed("generator.sampling.top_k=3") == ["sampling.top_k"]
    assert changed("generator.precision=bf16") == ["engine.precision"]
    assert changed("prompts.template=Say {prompt}") == ["prompts.template"]
    assert changed("rewards.functions.0.weight=2") == ["rewards.functions"]


def test_a_changed_program_changes_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_changing_program.py").write_text("x = 1\n")
    before = settings.source_digest("a_changing_program:x")
    (tmp_path / "a_changing_program.py").write_text("x = 2\n")
    assert settings.source_digest("a_changing_program:x") != before
    assert settings.source_digest("no_such_module:x") is None


def test_the_digest_of_a_model_is_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    whole = folder_digest(tmp_path)
    assert folder_digest(tmp_path) == whole
    (tmp_path / "model.safetensors").write_bytes(bytes(4999) + b"x")
    assert folder_digest(tmp_path) != whole
    monkeypatch.setattr(settings, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(settings, "_BLOCK", 10)
    sampled = folder_digest(tmp_path)
    assert sampled.startswith("sampled:")
    (tmp_path / "model.safetensors").write_bytes(b"x" + bytes(4998) + b"x")  # its ends are always read
    assert folder_digest(tmp_path) != sampled


def test_settings_that_differ_are_named() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": None, "gone": 3}
    now = {"a": {"b": 2, "c": [1]}, "d": {"e": 1}, "new": "x"}
    assert changed_settings(before, now) == [
        "a.b: 1 -> 2",
        'd: null -> {"e": 1}',
        "gone: 3 -> null",
        'new: null -> "x"',
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["eval.endpoint={url: 'http://h'}", "eval.run=x"], "endpoint"),
        (["eval.endpoint={url: 'http://h'}", "model.preset=tiny"], "model"),
        (["eval.endpoint={url: 'http://h'}", "generator.engine=vllm"], "generator.engine"),
        (["eval.endpoint={url: h}"], "url"),
        (["generator.sampling.n=2"], "generator.sampling.n"),
        (["generator.update.mode=abort"], "generator.update"),
        (["eval.pass_at=[1, 1]"], "pass_at"),
        (["eval.confidence=1"], "confidence"),
        (["eval.num_samples=0"], "num_samples"),
    ],
)
def test_keys_without_a_meaning_are_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        load(EvalConfig, overrides=overrides)
    assert any(problem.path.endswith(key) for problem in refused.value.problems)


def test_every_k_of_pass_at_k() -> None:
    assert EvalSection(num_samples=6).ks == (1, 2, 4, 6)
    assert EvalSection(num_samples=6, pass_at=(5, 2)).ks == (2, 5)
    assert EvalSection().ks == (1,)


# ---- Figures


def score(task: int, sample: int, reward: float, **fields: Any) -> SampleScore:
    known: dict[str, Any] = {"num_failures": 0, "outcome": "finished", "num_tokens": 4, "num_turns": 1}
    return SampleScore(task, sample, f"t{task}", reward, {"right": reward, "form": 1.0}, **{**known, **fields})


def test_tasks_that_lack_a_sample_are_left_out_of_all_figures() -> None:
    section = EvalSection(num_samples=2, reward="right", solved_at=0.5)
    scores = [score(5, 0, 1.0), score(5, 1, 0.0), score(2, 0, 1.0, num_tokens=100), score(9, 0, 0.4), score(9, 1, 0.2)]
    by_key = {(each.task, each.sample): each for each in scores}
    found = summarize(
        section,
        task_order(by_key, (9, 5, 2)),
        (9, 5, 2),
        folder=Path("x"),
        faults={"endpoint": 3},
        last_faults={(2, 1): "endpoint: gone"},
    )
    assert (found.num_tasks, found.num_missing, found.exit_code) == (2, 1, 1)
    assert found.unresolved == [(2, 1, "endpoint: gone")]
    assert found.reward is not None
    assert found.reward.value == pytest.approx(0.4)
    assert [task.index for task in found.tasks] == [5, 9]
    assert {k: estimate.value for k, estimate in found.pass_at.items()} == {1: 0.25, 2: 0.5}
    assert found.parts == {"form": 1.0, "right": pytest.approx(0.4)}
    assert (found.length, found.turns, found.outcomes) == (4.0, 1.0, {"finished": 4})
    assert json.loads(json.dumps(found.plain()))["figures"]["faults"] == {"endpoint": 3}


def test_a_reward_that_no_sample_has_is_noted() -> None:
    section = EvalSection(reward="wrong")
    found = summarize(section, [[score(0, 0, 1.0)]], (0,), folder=Path("x"), faults={}, last_faults={})
    assert found.pass_at[1].value == 0.0
    assert "none counts as solved" in found.notes[0]


def test_nothing_done_has_no_figures() -> None:
    found = summarize(EvalSection(allow_missing=True), [[]], (0,), folder=Path("x"), faults={}, last_faults={})
    assert (found.reward, dict(found.pass_at), found.num_missing, found.exit_code) == (None, {}, 1, 0)


def test_sampling_options_become_parameters_of_a_request() -> None:
    base = {"temperature": 0.5, "top_p": 1.0, "seed": 2**40 + 3, "max_tokens": NO_LIMIT, "stop": ("x",), "top_k": 0}
    assert request_options(base) == {"temperature": 0.5, "top_p": 1.0, "seed": (2**40 + 3) % 2**31, "stop": ["x"]}
    more = {**base, "max_tokens": 7, "top_k": 5, "include_stop": True, "stop_token_ids": (1, 2), "ignore_eos": False}
    found = request_options(more)
    assert (found["max_tokens"], found["top_k"], found["stop_token_ids"]) == (7, 5, [1, 2])
    assert found["include_stop_str_in_output"] is True
    assert "ignore_eos" not in found
