"""`forge episode try`: a model in this process, an endpoint, a configuration, and bad input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.cli.episode_inputs import read_task
from forge.config import GRPOConfig, load
from forge.envs.state import EpisodeKey
from forge.errors import ForgeError
from forge.testing.generators import FakeGenerator
from openai_serving import serving

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from forge.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return folder


def tried(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["episode", "try", *words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# ---- A model in this process


def test_a_model_runs_an_episode_with_the_seeds_of_a_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tried_episodes:compact", "--task", "Hi", "--model", str(tiny), "--max-tokens", "6", "--seed", "5"]
    found = tried(capsys, *words, "--number", "3", "--member", "2")
    key = EpisodeKey(5, 3, 2)
    assert [turn["seed"] for turn in found["turns"]] == [key.seed(0), key.seed(1)]
    assert [turn["prefix_break"] for turn in found["turns"]] == [None, "compaction"]
    assert [turn["num_sampled_tokens"] for turn in found["turns"]] == [6, 6]
    assert all(turn["num_prompt_tokens"] == turn["num_observed_tokens"] for turn in found["turns"])
    assert (found["outcome"], found["tokens_are_exact"], found["error"]) == ("finished", True, None)
    assert found["rewards"] == {"reward": found["reward"]}
    again = tried(capsys, *words, "--number", "3", "--member", "2")
    assert [turn["text"] for turn in again["turns"]] == [turn["text"] for turn in found["turns"]]


def test_text_shows_turns_breaks_rewards_and_totals(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "Hi", "--model", str(tiny), "--max-tokens", "6", "--temperature", "0"]
    assert main(["episode", "try", "tried_episodes:compact", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tried_episodes:compact"
    assert lines[1] == "task command line, run seed 0, group 0, member 0"
    assert "on the native engine" in lines[2]
    assert sum(line.startswith("── turn ") for line in lines) == 2
    assert "prefix break (compaction): the whole history was sent again, as a new branch" in lines
    assert any(line.startswith("outcome") and line.endswith("finished") for line in lines)
    assert any(line.startswith("tokens") and "12 sampled" in line for line in lines)
    assert lines[-1] == "prefix breaks 1 compaction"
    assert "\x1b" not in "".join(lines)


# ---- An endpoint


def test_an_endpoint_gets_messages_and_tools_and_its_own_calls_back(capsys: pytest.CaptureFixture[str]) -> None:
    policy = FakeGenerator([CALL, "It is 4."])
    task = '{"prompt": "2 + 2?", "answer": "4"}'
    with serving(policy) as server:
        words = ["--endpoint", server.base_url, "--task", task, "bonus=0.5", "--temperature", "0.5"]
        assert main(["episode", "try", "tried_episodes:calculate", *words]) == 0
    text = capsys.readouterr().out
    for part in (
        "note: tokens are not exact at an endpoint",
        "  calls add(a=2, b=2)",
        "tool add\n  4\n",
        "reward +0.5",
        "reward        1.5 (bonus 0.5, reward 1)",
        "tool calls    1 in",
        "sampled, as the endpoint reports",
    ):
        assert part in text
    first, second = policy.requests
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert first.template["tools"][0]["function"]["name"] == "add"
    assert first.sampling.temperature == 0.5
    assert second.messages is not None
    _, answer, result = second.messages
    assert answer["role"] == "assistant"
    (call,) = answer["tool_calls"]
    assert call["function"]["name"] == "add"
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "4", call["id"])


def test_limits_end_an_episode_at_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeGenerator([CALL])) as server:
        found = tried(
            capsys, "tried_episodes:calculate", "--endpoint", server.base_url, "--task", "2 + 2?", "--max-turns", "3"
        )
    assert (found["outcome"], len(found["turns"]), found["rewards"]) == ("turn_limit", 3, {"limit": 0.0})
    assert found["tokens_are_exact"] is False
    assert found["turns"][0]["calls"] == [{"name": "add", "arguments": {"a": 2, "b": 2}}]


def test_an_endpoints_failure_is_a_fault_that_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeGenerator([CALL, OSError("the disk is full")])) as server:
        words = ["tried_episodes:calculate", "--endpoint", server.base_url, "--task", "2 + 2?"]
        assert main(["episode", "try", *words]) == 1
    text = capsys.readouterr().out
    assert "── turn 0" in text
    assert "fault (endpoint): the endpoint answered 5" in text
    assert "outcome       failed" in text


def test_a_program_that_raises_is_shown_with_its_turns_and_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeGenerator(["Fine."])) as server:
        assert main(["episode", "try", "tried_episodes:broken", "--endpoint", server.base_url, "--task", "Hi"]) == 1
        text = capsys.readouterr().out
        found = tried(capsys, "tried_episodes:unrewarded", "--endpoint", server.base_url, "--task", "Hi", code=1)
    assert "── turn 0" in text
    assert "rewards       early 0.5" in text
    assert "Traceback" in text
    assert text.endswith("KeyError: 'mine'\n")
    assert "gave no reward" in found["error"]
    assert found["outcome"] is None


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--endpoint", "localhost:1"], ["path:   --endpoint", "value:  'localhost:1'", "repair: write it like http"]),
        (["--endpoint", "http://127.0.0.1:1/v1"], ["cannot be reached", "path:   --endpoint", "forge serve"]),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_named(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["episode", "try", "tried_episodes:calculate", "--task", "Hi", *words]) == 2
    text = capsys.readouterr().err
    assert all(part in text for part in parts), text


def test_a_refused_key_is_named_and_a_given_one_is_sent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(FakeGenerator(["4"]), api_key="open-sesame") as server:
        words = ["tried_episodes:calculate", "--endpoint", server.base_url, "--task", "Hi"]
        assert main(["episode", "try", *words]) == 2
        text = capsys.readouterr().err
        assert "path:   --api-key" in text
        assert "OPENAI_API_KEY" in text
        assert tried(capsys, *words, "--api-key", "open-sesame")["outcome"] == "finished"
        monkeypatch.setenv("OPENAI_API_KEY", "open-sesame")
        assert tried(capsys, *words)["outcome"] == "finished"


# ---- A configuration


def configuration(**episode: Any) -> str:
    records = [{"prompt": f"{n} + {n}?", "answer": str(2 * n), "prompt_id": f"sum {n}"} for n in range(8)]
    Path("tasks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    section = {"kind": "tried_episodes:calculate", "args": {"bonus": 0.25}, "limits": {"max_turns": 2}, **episode}
    prompts = {"sources": [{"path": "tasks.jsonl"}], "system_prompt": "Calculate."}
    Path("run.yaml").write_text(json.dumps({"run": {"seed": 7}, "prompts": prompts, "episode": section}))
    return "run.yaml"


def test_a_configuration_names_program_arguments_limits_and_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    from forge.data.prompts import PromptOrder, open_prompts

    file = configuration()
    config = load(GRPOConfig, files=[file])
    prompts = open_prompts(config.prompts, evaluation=config.evaluation, seed=7, for_episodes=True).train
    _, task = PromptOrder(prompts, seed=7, shuffle=config.prompts.shuffle).at(3)
    with serving(FakeGenerator([CALL])) as server:
        found = tried(capsys, "--config", file, "--number", "3", "--endpoint", server.base_url)
        changed = tried(
            capsys, "--config", file, "--number", "3", "--endpoint", server.base_url, "bonus=2", "max_turns=1"
        )
    assert found["task"]["id"] == task.id
    assert found["task"]["messages"] == [dict(message) for message in task.messages]
    assert found["task"]["messages"][0] == {"role": "system", "content": "Calculate."}
    assert (found["run_seed"], found["group"], found["args"]) == (7, 3, {"bonus": 0.25})
    assert (found["outcome"], len(found["turns"])) == ("turn_limit", 2)
    assert changed["args"] == {"bonus": 2, "max_turns": 1}
    assert changed["rewards"] == {"bonus": 2.0, "reward": 0.0}
    assert len(changed["turns"]) == 1


def test_context_and_longest_answer_are_those_of_the_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", configuration(), "--model", str(tiny), "training.max_seq_len=96"]
    found = tried(capsys, *words)
    assert "up to 96 tokens" in found["policy"]
    assert 0 < found["turns"][0]["num_sampled_tokens"] <= 48


# ---- Tasks


def test_a_task_is_json_text_or_a_record_of_a_file() -> None:
    config = load(GRPOConfig, files=[configuration()])
    system = {"role": "system", "content": "Calculate."}
    task = read_task('{"messages": [{"role": "user", "content": "Hi"}], "answer": 4, "level": 2}', config)
    assert task.messages == (system, {"role": "user", "content": "Hi"})
    assert (task.id, task.answer, task.metadata) == ("command line", "4", {"level": 2})
    assert read_task("Hi {you}", config).messages[1]["content"] == "Hi {you}"
    assert read_task("@tasks.jsonl", config).id == "sum 0"
    assert read_task("@tasks.jsonl:8", config).answer == "14"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ["path:   --task", "this is not JSON", 'repair: write it like \'{"messages"']),
        ('{"answer": 4}', ["path:   --task", "no prompt", "`messages`, `prompt` and `question`"]),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ["path:   --task", "rule:"]),
        (" ", ["the task is empty", "path:   --task", "value:  ' '"]),
        ("@nowhere.jsonl", ["nowhere.jsonl", "repair:"]),
        ("@tasks.jsonl:9", ["path:   --task", "value:  '@tasks.jsonl:9'", "rule:   a number from 1 to 8"]),
    ],
)
def test_a_task_that_cannot_be_read_is_named(text: str, parts: list[str]) -> None:
    config = load(GRPOConfig, files=[configuration()])
    with pytest.raises(ForgeError) as raised:
        read_task(text, config)
    assert all(part in str(raised.value) for part in parts), raised.value


# ---- Bad input


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            [],
            ["forge episode try needs one program", "path:   MODULE:ATTRIBUTE", "repair: forge episode try my_module"],
        ),
        (["a:b", "c:d"], ["needs one program", "value:  ['a:b', 'c:d']"]),
        (["tried_episodes"], ["episode.kind", "`module:attribute`"]),
        (["nowhere_at_all:solve"], ["episode.kind", "cannot be imported"]),
        (["tried_episodes:calculat"], ["episode.kind", "calculate"]),
        (["tried_episodes:CALL"], ["episode.kind"]),
        (["json:loads", "--task", "Hi"], ["is not an episode", "@forge.episode"]),
        (["tried_episodes:calculate", "--task", "Hi", "bonas=1"], ["episode.args", "bonas"]),
        (["tried_episodes:calculate", "--task", "Hi"], ["path:   --model", "repair: give --model FOLDER"]),
        (["tried_episodes:calculate", "model.preset=tiny"], ["there is no task", "path:   --task", "prompts.sources"]),
        (["tried_episodes:calculate", "--task", "x", "--model", "nowhere"], ["model.path", "nowhere"]),
        (["tried_episodes:calculate", "--task", "x", "--temperature", "hot"], ["sampling.temperature", "'hot'"]),
        (["tried_episodes:calculate", "--task", "x", "--max-turns", "0"], ["episode.limits.max_turns", "value:  0"]),
        (["tried_episodes:calculate", "--task", "x", "--tool-format", "xml"], ["episode.tool_format", "xml"]),
        (["tried_episodes:calculate", "--task", "x", "--number", "-1"], ["path:   --number", "value:  -1"]),
        (["tried_episodes:calculate", "--task", "x", "--member", "-1"], ["path:   --member", "rule:   a whole number"]),
        (["tried_episodes:calculate", "--task", "x", "--api-key", "k"], ["path:   --api-key", "only with --endpoint"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "the file must exist"]),
        (["--config", "empty.yaml"], ["the configuration names no program", "path:   episode.kind"]),
    ],
)
def test_bad_input_is_named(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.yaml").write_text("{}")
    assert main(["episode", "try", *words]) == 2
    captured = capsys.readouterr()
    assert all(part in captured.err for part in parts), captured.err
    assert "Traceback" not in captured.err


# ---- A terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, errors = Terminal(), Terminal()
    with serving(FakeGenerator(["Clear \x1b[2J 4."])) as server:
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", errors)
        assert main(["episode", "try", "tried_episodes:calculate", "--endpoint", server.base_url, "--task", "Hi"]) == 0
    assert errors.getvalue().startswith("turn 1 took ")
    text = screen.getvalue()
    assert "\x1b[1;36muser\x1b[0m" in text
    assert "\x1b[1;32massistant\x1b[0m\n  Clear �[2J 4." in text
