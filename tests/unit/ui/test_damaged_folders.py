"""Files of a run that are damaged, or written by somebody else: the page shows less, and nothing fails."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent_folders import make_agent_run
from forge.ui.compare_view import ComparedRun, compare_configs, compare_runs
from forge.ui.config_view import view_config
from forge.ui.decimation import Span, encode_table
from forge.ui.live_run import LiveRun
from forge.ui.rollouts.query import SORTS, Filters, SampleName
from forge.ui.rollouts.view import RolloutView, Window
from forge.ui.run_summary import SummaryReader
from forge.ui.strict_json import to_json
from fuzzing import inputs
from run_folders import make_grpo_run

NUM_INPUTS = 150
NUM_ROLLOUTS = 250
EVENT = json.dumps({"time": "2026-01-01T00:00:00+00:00", "event": "crash", "status": -9, "action": "stop", "step": 3})
LEAGUE = {"member": "a", "rating": 1.0, "games": 1, "wins": 1, "draws": 0, "losses": 0, "win_rate": 1.0}
VALID = {
    "supervisor.jsonl": f"{EVENT}\n".encode(),
    "results.json": json.dumps({"time": 1.0, "figures": {"reward": {"value": 0.5}}}).encode(),
    "league.json": json.dumps({"step": 1, "rating": 1.0, "members": [LEAGUE]}).encode(),
    "runtime_changes.jsonl": b'{"time": "2026-01-01T00:00:00", "step": 1, "key": "a.b", "before": 1, "after": 2}\n',
}


def strict(text: str) -> object:
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "ledger.jsonl", *VALID])
def test_damaged_files_are_read_as_far_as_they_go(tmp_path: Path, name: str) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=2)
    path = folder / name
    valid = path.read_bytes() if path.exists() else VALID[name]
    for data in inputs(41, [valid], NUM_INPUTS):
        path.write_bytes(data)
        summary = SummaryReader(folder, "run").read()
        strict(to_json(summary.plain()))
        run = LiveRun(folder)
        while run.advance():
            pass
        strict(to_json(run.describe(summary)))
        strict(encode_table(run.rows(), Span(points=2)))
        if name == "config.yaml":
            strict(to_json(view_config(folder, None)))


def show_all(folder: Path) -> int:
    """Ask for everything that a page could ask of the rollouts. Return how many there are."""
    view, sorts = RolloutView(folder), list(SORTS)
    names: list[str] = []
    for number, filters in enumerate((Filters(), Filters(text="e"), Filters.of({"reward": "0~", "flags": "mixed"}))):
        found = view.find(filters, sorts[number], Window(limit=200))
        strict(to_json(found))
        names += [row["name"] for row in found["rows"]]
    for name in dict.fromkeys(names):
        parsed = SampleName.of(name, parameter="name")
        strict(to_json(view.sample(parsed, limit=64, metric=lambda metric, step: 1.0)))
        strict(to_json(view.group(parsed, metric=lambda metric, step: None)))
    return len(set(names))


@pytest.mark.parametrize("kind", ["grpo", "agents"])
def test_damaged_rollouts_are_shown_as_far_as_they_go(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "run"
    if kind == "grpo":
        make_grpo_run(folder, num_steps=1, num_groups=1)
    else:
        make_agent_run(folder, num_steps=1)
        (folder / "config.yaml").write_text("algorithm: {preset: gspo, kl: {coefficient: 0.1}}\n")
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[:2]
    shown = []
    for data in inputs(47, [lines[0]], NUM_ROLLOUTS):
        path.write_bytes(data + b"\n" + lines[1])
        shown.append(show_all(folder))
    assert {1, 2} <= set(shown)


ODD: dict[str, list[object]] = {
    "token_ids": [[], ["x"] * 3, [None, {}]],
    "pieces": [3, ["a"], [1, 2], None],
    "logprobs": [None, [], "x", [[1]], ["NaN"], [1e400, -1e400]],
    "trainer_logprobs": [None, {}, [True], [None]],
    "versions": [None, [[1]], [[1, 2, 3, 4]], [["x", 0, 1]], [[1 << 80, 0, 1]]],
    "reward": [None, "1", 1e400, [1], True, 10**400],
    "advantage": [None, {}, -1e400, 10**400],
    "prompt": [None, 7, [[]], [{"role": {}, "content": [1]}], {}],
    "prompt_id": [None, 5, ["x"], "x" * 100_000],
    "parts": [None, [], {"a": "b"}, {"": None}],
    "failures": [3, ["x"], {"a": 1}],
    "outcome": [None, 5, "other" * 1000, ["trained"]],
    "finish_reason": [None, 3, {}],
    "ending": [3, [], "x" * 5000],
    "stats": [None, [], {"num_tool_errors": "x"}, {"a": 1e400}],
    "agents": [[], {"a": None}, {"a": {"learns": False}}, {"": {"advantage": "x"}}],
    "turns": [None, {}, [None], [{}], [{"index": 0, "start": 0, "end": 1 << 70}]],
    "epoch": [{}, "x"], "temperature": ["x"], "answer": [5, {}], "reason": [5, []], "index": [0, 1 << 31, -1],
}  # fmt: skip
"""Values that a writer of another program might put into a line."""


@pytest.mark.parametrize("kind", ["grpo", "agents"])
def test_values_of_other_kinds_are_shown_as_far_as_they_go(tmp_path: Path, kind: str) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=1) if kind == "grpo" else make_agent_run(tmp_path / "run")
    path = sorted(folder.glob("rollouts/step_*"))[0]
    line = json.loads(path.read_bytes().splitlines()[0])
    for name, values in ODD.items():
        for value in values:
            changed = {**line, name: value}
            if kind == "agents" and name in line["turns"][0]:
                changed = {**line, "turns": [{**turn, name: value} for turn in line["turns"]]}
            path.write_text(json.dumps(changed) + "\n")
            assert show_all(folder) >= (name not in ("index", "token_ids"))
    of_turns = ("messages", "context", "calls", "path", "prefix_break", "agent", "is_delivered", "text", "reward")
    for name in of_turns if kind == "agents" else ():
        for value in (None, 5, "x", [], [None], [{"name": {}, "arguments": "x" * 9000}], {}, [[[]]], True):
            path.write_text(json.dumps({**line, "turns": [{**turn, name: value} for turn in line["turns"]]}) + "\n")
            assert show_all(folder) >= 1


HUGE = "1" + "0" * 400
LINE = '{"step": 1, "time": %s, "values": {"train/loss": %s}, "nonfinite": %s}\n'
LAUGHS = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [*{below}, *{below}, *{below}, *{below}]\n"
    for below, name in itertools.pairwise("abcdefghijklmnop")
)
HOSTILE = {
    "a time that no float holds": ("metrics.jsonl", LINE % (HUGE, 1, "{}")),
    "a metric that no float holds": ("metrics.jsonl", LINE % (1, HUGE, "{}")),
    "an infinity that no float holds": ("metrics.jsonl", LINE % (1, 1, f'{{"a": {HUGE}}}')),
    "the time of results": ("results.json", f'{{"time": {HUGE}, "figures": {{"reward": {{"value": 1}}}}}}'),
    "the reward of results": ("results.json", f'{{"time": 1, "figures": {{"reward": {{"value": {HUGE}}}}}}}'),
    "a tag that does not fit": ("config.yaml", "a: !!bool x\n"),
    "an empty number": ("config.yaml", 'a: !!int ""\n'),
    "a number too long to write": (
        "config.yaml",
        f"run: {{name: 0x{'f' * 5000}}}\ntraining: {{max_steps: 0x{'f' * 5000}}}\n",
    ),
    "a number of base 60": ("config.yaml", f"a: {':'.join('1' * 400)}.0\n"),
    "dates in a list": ("config.yaml", "a: [2020-01-01, {2020-01-02: 1}]\n"),
    "a list that has itself": ("config.yaml", "a: &a [*a]\nb: &b {c: *b}\n"),
    "values without end": ("config.yaml", LAUGHS),
    "values nested deep": ("faults.jsonl", f'{{"a": {"[" * 900}NaN{"]" * 900}}}\n'),
}
"""What a file can say that parses, and that numbers, recursion or memory do not bear."""


@pytest.mark.parametrize("what", HOSTILE)
def test_nothing_that_a_file_says_ends_the_server(tmp_path: Path, what: str) -> None:
    name, text = HOSTILE[what]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text(text)
    summary = SummaryReader(folder, "run").read()
    strict(to_json(summary.plain()))
    run = LiveRun(folder)
    while run.advance():
        pass
    strict(to_json(run.describe(summary)))
    strict(encode_table(run.rows(), Span(points=2)))
    strict(to_json(view_config(folder, None)))
    strict(to_json(compare_runs([ComparedRun(run, summary)])))
    strict(to_json(compare_configs([folder])))


@pytest.mark.parametrize("text", ["[" * 400_000, "- " * 400_000, "{a: " * 200_000], ids=["lists", "items", "mappings"])
def test_a_configuration_that_is_nested_deep_is_not_followed(tmp_path: Path, text: str) -> None:
    """PyYAML's parser in C follows it until the process has no stack left."""
    (tmp_path / "config.yaml").write_text(text)
    code = (
        "import sys; from pathlib import Path; from forge.ui.run_summary import read_settings\n"
        "print(read_settings(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "{}\n")


def test_a_rollout_that_is_nested_deep_is_left_out(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=1, num_groups=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    line = json.loads(path.read_bytes().splitlines()[0])
    whole = json.dumps({**line, "prompt": "half \ud800"})
    deep = whole[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}"
    path.write_text(f"{deep}\n{whole}\n")
    assert show_all(folder) == 1
