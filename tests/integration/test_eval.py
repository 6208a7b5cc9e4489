"""`forge eval` against a model, a run's checkpoint and an endpoint, with its services in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import grpo_runs
from answering_endpoint import answering, digits_of
from forge.cli import main
from local_services import services_here

TINY = ["model.preset=tiny", "--max-tokens", "8"]
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, and services in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with services_here():
        yield tmp_path


def evaluate(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run `forge eval … --json`, and return what it printed."""
    found = main(["eval", *words, "--json"])
    printed = capsys.readouterr()
    assert found == code, printed.err
    results: dict[str, Any] = json.loads(printed.out)
    return results


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """Run a command that is refused, and return why."""
    found = main(["eval", *words])
    printed = capsys.readouterr()
    assert found == code, printed.out + printed.err
    return printed.err


def samples(folder: str) -> dict[tuple[int, int], dict[str, Any]]:
    lines = [json.loads(line) for line in Path(folder, "samples.jsonl").read_text().split("\n")[:-1]]
    found = {(line["group"], line["index"]): line for line in lines}
    assert len(found) == len(lines)
    return found


def write_tasks(path: str, count: int, *, first: int = 0) -> str:
    records = [{"prompt": f"Question {number}?", "answer": str(number % 3)} for number in range(first, first + count)]
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def guess(body: Mapping[str, Any]) -> str:
    """Answer a question by its text and the seed alone."""
    messages = body.get("messages") or [{"content": body["prompt"]}]
    return f"I say {(digits_of(messages[-1]['content']) + body['seed']) % 3}"


# ---- A model


def test_prompts_and_rewards_against_a_model_do_not_depend_on_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--tasks", "arithmetic", "--num-tasks", "5", "--reward", "grpo_rewards:even", "-n", "3"]
    words += ["eval.solved_at=0.5"]
    one = evaluate(capsys, *words, "--output", "one")
    other = evaluate(capsys, *words, "--output", "other", "--max-concurrent", "2", "--num-replicas", "2")
    kept = ("token_ids", "text", "reward", "logprobs", "prompt_id")
    assert {key: [line[name] for name in kept] for key, line in samples("one").items()} == {
        key: [line[name] for name in kept] for key, line in samples("other").items()
    }
    assert one["figures"]["pass_at"] == other["figures"]["pass_at"]
    texts = [line["text"] for line in samples("one").values()]
    assert len(set(texts)) > 10  # every sample has a seed of its own

    figures = one["figures"]
    assert (figures["num_tasks"], figures["num_missing"], figures["num_samples"]) == (5, 0, 3)
    rewards = [line["reward"] for line in samples("one").values()]
    assert figures["reward"]["value"] == pytest.approx(sum(rewards) / 15)
    assert figures["reward"]["low"] < figures["reward"]["value"] < figures["reward"]["high"]
    assert figures["pass_at"]["1"]["value"] == pytest.approx(sum(reward >= 0.5 for reward in rewards) / 15)
    assert list(figures["pass_at"]) == ["1", "2", "3"]
    assert figures["parts"] == {"even": pytest.approx(sum(rewards) / 15)}
    assert figures["length"] == sum(len(line["token_ids"]) for line in samples("one").values()) / 15
    assert sum(figures["outcomes"].values()) == 15
    assert one["target"]["kind"] == "model"
    assert len(one["target"]["digest"]) == 32
    assert one["code"]["forge"]
    assert one["is_complete"] is True
    assert json.loads(Path("one/results.json").read_text())["figures"] == figures


def test_another_seed_samples_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", write_tasks("tasks.jsonl", 3), "--reward", "exact", "--max-tokens", "8"]
    evaluate(capsys, *words, "--model", "tiny", "--output", "one")
    evaluate(capsys, *words, "model.preset=tiny", "--output", "other", "--seed", "1")
    texts = [[line["text"] for _, line in sorted(samples(name).items())] for name in ("one", "other")]
    assert texts[0] != texts[1]


def test_a_program_of_several_turns_against_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--tasks", write_tasks("tasks.jsonl", 4), "--episode", "own_episodes:dialogue", "-n", "2"]
    found = evaluate(capsys, *words, "num_turns=2", "--output", "one")
    assert found["figures"]["turns"] == 2.0
    assert set(found["figures"]["parts"]) == {"even", "reward"}
    assert found["settings"]["episode"]["args"] == {"num_turns": 2}
    line = samples("one")[0, 0]
    assert [turn["messages"][-1]["content"] for turn in line["turns"]] == ["Question 0?", "Again?"]
    assert line["num_tokens"] == len(line["token_ids"]) > 0
    assert "episode.args.num_turns: 2 -> 3" in refused(capsys, *words, "num_turns=3", "--output", "one")


def test_the_same_command_again_starts_nothing_and_counts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--tasks", write_tasks("tasks.jsonl", 3), "--reward", "grpo_rewards:even", "--output", "one"]
    first = evaluate(capsys, *words)
    before = Path("one/samples.jsonl").read_bytes()
    again = evaluate(capsys, *words, "eval.solved_at=0", "eval.confidence=0.5")
    assert Path("one/samples.jsonl").read_bytes() == before
    assert again["figures"]["pass_at"]["1"]["value"] == 1.0
    assert again["figures"]["reward"]["value"] == first["figures"]["reward"]["value"]
    width = [found["figures"]["reward"]["high"] - found["figures"]["reward"]["low"] for found in (first, again)]
    assert width[1] < width[0]


def test_a_line_that_a_kill_cut_off_is_sampled_again(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, "--tasks", write_tasks("tasks.jsonl", 3), "--reward", "exact", "-n", "2", "--output", "one"]
    evaluate(capsys, *words)
    whole = samples("one")
    path = Path("one/samples.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:40])
    evaluate(capsys, *words)
    assert path.read_bytes().startswith(b"".join(lines[:3]))
    assert {key: line["text"] for key, line in samples("one").items()} == {
        key: line["text"] for key, line in whole.items()
    }


def test_changed_settings_are_refused_with_what_changed(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = write_tasks("tasks.jsonl", 3)
    words = [*TINY, "--tasks", tasks, "--reward", "exact", "--output", "one"]
    evaluate(capsys, *words)
    text = refused(capsys, *words, "--temperature", "0.5", "-n", "2")
    assert "made with other settings" in text
    assert "num_samples: 1 -> 2" in text
    assert "sampling.temperature: 1.0 -> 0.5" in text
    assert "--overwrite" in text
    write_tasks(tasks, 3, first=1)
    assert "tasks.digest: " in refused(capsys, *words)
    before = samples("one")
    evaluate(capsys, *words, "--overwrite")
    assert samples("one").keys() == before.keys()


# ---- A run's checkpoint


def test_a_runs_checkpoints_with_its_own_tasks_and_rewards(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    chosen = grpo_runs.config(place / "trained", "evaluation.fraction=0.25", "checkpointing.keep=9")
    trained = grpo_runs.train(chosen)
    capsys.readouterr()
    newest = evaluate(capsys, "--run", "trained", "--output", "newest")
    assert trained.evaluation is not None
    assert newest["figures"]["reward"]["value"] == pytest.approx(trained.evaluation.reward, abs=1e-12)
    assert newest["target"]["step"] == grpo_runs.NUM_STEPS
    assert newest["figures"]["num_tasks"] == 10  # those that it holds out
    assert set(newest["figures"]["parts"]) == {"even"}
    assert newest["settings"]["engine"]["max_seq_len"] == 64
    assert newest["settings"]["sampling"]["temperature"] == 0.0
    assert not Path("newest/model").exists()
    assert {line["step"] for line in samples("newest").values()} == {grpo_runs.NUM_STEPS}

    first = evaluate(capsys, "--run", "trained", "--step", "2", "--output", "first")
    assert first["target"]["digest"] != newest["target"]["digest"]
    texts = [[line["text"] for _, line in sorted(samples(name).items())] for name in ("first", "newest")]
    assert texts[0] != texts[1]

    # The model that the run exported has the same weights as its last checkpoint.
    words = ["--config", "trained.yaml", "eval.heldout_fraction=0.25", "generator.max_seq_len=64"]
    kept = {"prompts", "rewards", "generator"}
    content = {key: value for key, value in json.loads(Path("trained.yaml").read_text()).items() if key in kept}
    Path("trained.yaml").write_text(json.dumps(content))
    evaluate(capsys, *words, "--model", "trained", "--temperature", "0", "--output", "exported")
    assert {key: line["token_ids"] for key, line in samples("exported").items()} == {
        key: line["token_ids"] for key, line in samples("newest").items()
    }

    assert main(["eval", "compare", "first", "newest"]) == 0
    printed = capsys.readouterr().out
    assert "10 tasks" in printed
    assert "target.step: 2 -> 6" in printed
    assert main(["eval", "compare", "first", "newest", "--json"]) == 0
    (compared,) = json.loads(capsys.readouterr().out)
    difference = compared["figures"]["reward"]["difference"]["value"]
    assert difference == pytest.approx(newest["figures"]["reward"]["value"] - first["figures"]["reward"]["value"])
    assert "one of 2, 4, 6" in refused(capsys, "--run", "trained", "--step", "3", "--output", "none")


# ---- An endpoint


def test_prompts_and_rewards_against_an_endpoint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = write_tasks("tasks.jsonl", 12)
    with answering(guess) as server:
        words = ["--endpoint", server.url, "--tasks", tasks, "--reward", "number", "-n", "3", "--temperature", "0.7"]
        monkeypatch.setenv("MY_KEY", "sk-mine")
        found = evaluate(capsys, *words, "--model", "m", "--api-key-env", "MY_KEY", "--output", "one")
        assert {body["model"] for body in server.requests} == {"m"}
        assert {body["temperature"] for body in server.requests} == {0.7}
        assert len({body["seed"] for body in server.requests}) == 36
        assert set(server.keys) == {"Bearer sk-mine"}
        again = evaluate(capsys, *words, "--output", "other")
        assert again["target"]["name"] == "stand-in"
    assert found["figures"]["length"] == 3.0  # as it reports
    assert found["figures"]["reward"]["value"] == again["figures"]["reward"]["value"]
    assert 0 < found["figures"]["pass_at"]["1"]["value"] < found["figures"]["pass_at"]["3"]["value"]
    assert "sk-mine" not in "".join(path.read_text() for path in Path("one").iterdir() if path.is_file())


def test_text_to_continue_goes_to_completions(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(guess) as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 2), "--reward", "number"]
        evaluate(capsys, *words, "prompts.chat=false", "--output", "one")
        assert set(server.paths) == {"/v1/completions"}
        assert server.requests[0]["prompt"].startswith("Question")


def test_a_program_against_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda body: f"Answer {len(body['messages'])}") as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 3)]
        found = evaluate(capsys, *words, "--episode", "own_episodes:dialogue", "--output", "one")
    assert found["figures"]["turns"] == 3.0
    assert found["figures"]["length"] == 6.0
    line = samples("one")[0, 0]
    assert [turn["text"] for turn in line["turns"]] == ["Answer 1", "Answer 3", "Answer 5"]
    assert line["token_ids"] == []


def test_faults_are_retried_counted_and_never_scored(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = [500, 500]

    def answer(body: Mapping[str, Any]) -> str | int:
        text = body["messages"][-1]["content"]
        if text == "Question 1?":
            return 500  # always
        if text == "Question 2?" and refusals:
            return refusals.pop()
        return "2"

    with answering(answer) as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 4), "--reward", "number"]
        words += ["--output", "one"]
        found = evaluate(capsys, *words, code=1)
        assert found["figures"]["num_missing"] == 1
        assert found["figures"]["num_tasks"] == 3
        assert found["figures"]["faults"] == {"endpoint": 6}  # 4 attempts of one, 2 of the other
        assert found["figures"]["reward"]["value"] == pytest.approx(1 / 3)
        assert [(each["task"], each["sample"]) for each in found["unresolved"]] == [(1, 0)]
        assert "answered 500" in found["unresolved"][0]["fault"]
        assert found["is_complete"] is False
        assert (1, 0) not in samples("one")
        evaluate(capsys, *words, "--allow-missing")  # tried again, in vain, and accepted
    with answering(lambda body: "1") as server:  # the server works again, under another address
        words[1] = server.url
        settings = json.loads(Path("one/settings.json").read_text())
        settings["target"]["url"] = server.url
        Path("one/settings.json").write_text(json.dumps(settings))
        found = evaluate(capsys, *words)
        assert len(server.requests) == 1  # what is there is not asked again
    assert found["figures"]["num_missing"] == 0
    assert found["figures"]["reward"]["value"] == pytest.approx(2 / 4)


def test_an_endpoint_that_is_gone_ends_the_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda body: 404) as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 40), "--reward", "number"]
        text = refused(capsys, *words, "episode.max_retries=0", "episode.max_failed_groups=3", code=1)
        assert "3 samples in a row failed by faults" in text
        assert "answered 404" in text
    results = json.loads(Path("runs/eval/results.json").read_text())
    assert results["figures"]["num_tasks"] == 0
    assert results["figures"]["reward"] is None


def test_a_busy_endpoint_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    busy = [429, 503]
    with answering(lambda body: busy.pop() if busy else "1") as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 1), "--reward", "number"]
        found = evaluate(capsys, *words)
    assert found["figures"]["faults"] == {}


# ---- Looking at it


def test_samples_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(lambda body: "It is 0.") as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 6), "--reward", "number"]
        assert main(["eval", *words, "--output", "one"]) == 0
    printed = capsys.readouterr().out
    assert "stand-in: 6 tasks, 1 sample each" in printed
    assert "pass@1        0.3333" in printed
    assert "faults        none" in printed

    assert main(["eval", "show", "one"]) == 0
    assert "1      0/1      0        tasks.jsonl:2" in capsys.readouterr().out
    assert main(["eval", "show", "one", "--failed"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("not solved") == 4
    assert "Question 1?" in printed
    assert "Question 0?" not in printed
    assert main(["eval", "show", "one", "--task", "3"]) == 0
    printed = capsys.readouterr().out
    assert "── task 3 (tasks.jsonl:4), sample 0: solved" in printed
    assert main(["eval", "show", "one", "--task", "tasks.jsonl:4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["group"] == 3
    assert main(["report", "one"]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 samples" in printed
    page = Path("one/report.html").read_text()
    assert "Question 5?" in page
    assert '"text":"It is 0."' in page  # what has no tokens is shown as text
    Path("one/results.json").unlink()  # as after a kill
    assert main(["eval", "show", "one"]) == 2
    assert "this evaluation has no results yet" in capsys.readouterr().err
    assert main(["report", "one"]) == 0
    assert "The evaluation has not ended" in capsys.readouterr().out


def test_different_tasks_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(guess) as server:
        for name, first in (("one", 0), ("same", 0), ("other", 1)):
            tasks = write_tasks(f"{name}.jsonl", 5, first=first)
            evaluate(capsys, "--endpoint", server.url, "--tasks", tasks, "--reward", "number", "--output", f"e-{name}")
    assert main(["eval", "compare", "e-one", "e-other"]) == 2
    text = capsys.readouterr().err
    assert "these evaluations have different tasks" in text
    assert "digest" in text
    assert main(["eval", "compare", "e-one", "e-same"]) == 0  # the same tasks from another file
    assert "0/0/5" in capsys.readouterr().out


def test_the_same_tasks_at_other_places_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(write_tasks("all.jsonl", 5)).read_text().splitlines(keepends=True)
    with answering(lambda body: body["messages"][-1]["content"][9]) as server:
        common = ["--endpoint", server.url, "--reward", "number"]
        evaluate(capsys, *common, "--tasks", "all.jsonl", "--num-tasks", "3", "--seed", "3", "--output", "some")
        chosen = json.loads(Path("some/results.json").read_text())["indices"]
        assert chosen != [0, 1, 2]
        Path("part.jsonl").write_text("".join(lines[index] for index in chosen))
        evaluate(capsys, *common, "--tasks", "part.jsonl", "--output", "part")
    assert main(["eval", "compare", "some", "part"]) == 0
    assert "0/0/3" in capsys.readouterr().out


# ---- Bad input


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tasks", "tasks.jsonl", "--reward", "number"], ["nothing is named that could be evaluated", "--run RUN"]),
        ([*TINY, "--reward", "number"], ["no tasks to evaluate on", "path:   prompts.sources"]),
        ([*TINY, "--tasks", "tasks.jsonl"], ["nothing scores the answers", "--episode"]),
        ([*TINY, "--tasks", "nowhere.jsonl", "--reward", "number"], ["nowhere.jsonl"]),
        ([*TINY, "--tasks", "tasks.jsonl", "--reward", "numbr"], ["did you mean `number`"]),
        ([*TINY, "--tasks", "tasks.jsonl", "--episode", "own_episodes:nothing"], ["own_episodes", "nothing"]),
        ([*TINY, "--tasks", "tasks.jsonl", "--episode", "own_episodes:dialogue", "turns=2"], ["episode.args", "turns"]),
        ([*TINY, "--tasks", "tasks.jsonl", "--reward", "number", "eval.reward=exact"], ["one of number"]),
        (
            [*TINY, "--tasks", "tasks.jsonl", "--reward", "number", "-n", "2", "--temperature", "0"],
            ["samples at temperature 0 would all be the same", "--temperature 1"],
        ),
        ([*TINY, "--tasks", "tasks.jsonl", "--reward", "number", "-n", "two"], ["eval.num_samples", "'two'"]),
        (
            [*TINY, "--tasks", "tasks.jsonl", "--reward", "number", "eval.pass_at=[1, 2]"],
            ["eval.pass_at", "num_samples"],
        ),
        (["--run", "nowhere"], ["this is not the folder of a run", "--model FOLDER"]),
        (["--run", "a", "--model", "b"], ["one model is evaluated at a time"]),
        (["--model", "m", "--api-key-env", "KEY"], ["only with --endpoint"]),
        ([*TINY, "--step", "3", "--tasks", "tasks.jsonl", "--reward", "number"], ["eval.step", "only with eval.run"]),
        (
            ["--endpoint", "localhost:1", "--tasks", "tasks.jsonl", "--reward", "number"],
            ["eval.endpoint.url", "http://"],
        ),
        (
            ["--endpoint", "http://127.0.0.1:1/v1", "--tasks", "tasks.jsonl", "--reward", "number"],
            ["the endpoint cannot be reached"],
        ),
        (
            ["--endpoint", "http://h/v1", "generator.max_batch=3", "--tasks", "tasks.jsonl", "--reward", "number"],
            ["generator.max_batch", "no generator is started"],
        ),
        ([*TINY, "episode.group_reward=a:b"], ["episode.group_reward", "scored one by one"]),
        (
            [*TINY, "--tasks", "tasks.jsonl", "--reward", "number", "episode.limits.max_turns=3"],
            ["episode.limits.max_turns", "value:  3", "only with episode.kind"],
        ),
        ([*TINY, "generator.sampling.seed=3"], ["run.seed decides"]),
        (["my_module:solve"], ["neither a command nor an argument", "--episode"]),
        (["show", "nowhere"], ["this is not the folder of an evaluation"]),
        (["compare", "nowhere", "other"], ["this is not the folder of an evaluation"]),
        (["compare", "nowhere"], ["at least two folders"]),
        (["compare", "a", "b", "--confidence", "2"], ["above 0 and below 1"]),
    ],
)
def test_bad_input_is_named(capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]) -> None:
    write_tasks("tasks.jsonl", 2)
    text = refused(capsys, *words)
    for part in expected:
        assert part in text
    assert not Path("runs").exists()


def test_a_folder_in_use_and_a_damaged_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from forge.trainer.checkpoint_folder import WriterLock

    with answering(guess) as server:
        words = ["--endpoint", server.url, "--tasks", write_tasks("tasks.jsonl", 2), "--reward", "number"]
        evaluate(capsys, *words)
        folder = Path("runs/eval")
        lock = WriterLock(folder)
        assert "Another run is writing into this folder" in refused(capsys, *words)
        lock.release()
        path = folder / "samples.jsonl"
        line = path.read_text().split("\n")[0]
        path.write_text(f"{line}\n{line}\n")
        assert "is there twice" in refused(capsys, *words)
        path.write_text("{}\n")
        assert f"{path}:1" in refused(capsys, *words)
        (folder / "results.json").write_text("{}")
        assert main(["eval", "show", str(folder)]) == 2
        assert "the results cannot be read" in capsys.readouterr().err
