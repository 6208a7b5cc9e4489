"""The program of the report, run without a browser: what a reader sees of an episode of several turns."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_folders import make_agent_run, make_turn
from forge.observe.league_table import LEAGUE_TABLE
from forge.observe.report import write_report
from run_folders import HOSTILE, decode, encode, make_grpo_run

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
RUNNER = Path(__file__).resolve().parents[1] / "support" / "page_outline.js"

Node = dict[str, Any]


def outline(page: Path, script: str = "") -> Node:
    done = subprocess.run(
        ["node", RUNNER, page, script], capture_output=True, text=True, timeout=300, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    found: Node = json.loads(done.stdout)
    return found


def find(node: Node, name: str) -> list[Node]:
    """The elements of a class or tag, in the order of the page."""

    def within(each: Node) -> Iterator[Node]:
        if name in each["class"] or name == each["tag"]:
            yield each
        for child in each["children"]:
            yield from within(child)

    return list(within(node))


def texts(node: Node, name: str) -> list[str]:
    return [each["text"] for each in find(node, name)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_agent_run(tmp_path_factory.mktemp("runs") / "agents")).path


def test_a_conversation_is_shown_turn_by_turn(page: Path) -> None:
    (detail,) = find(outline(page), "detail")
    turns = find(detail, "turn")
    assert texts(detail, "h5") == ["Turn 1", "Turn 2", "Turn 3", "Turn 4 · branch 0", "Turn 5 · branch 0"]
    assert [len(find(turn, "heard")) for turn in turns] == [2, 1, 1, 1, 0]
    assert [find(turn, "tokens")[0]["text"] for turn in turns][:2] == ["Let me check<|im_end|>", "wait<|im_end|>"]
    assert texts(turns[0], "who")[0] == "systemread, not in the loss"
    assert texts(turns[1], "who")[0] == "toollookup · call_0_0read, not in the loss"
    assert texts(turns[0], "call") == ['calls lookupcall_0_0{"sum": "17+25"}']
    assert texts(turns[1], "call") == ["malformed callcall_1_0it has no end"]
    assert ["depth1" in turn["class"] for turn in turns] == [False, False, False, True, True]


def test_a_turn_says_what_counts_and_what_it_earned(page: Path) -> None:
    turns = find(find(outline(page), "detail")[0], "turn")
    said = [find(turn, "said")[0] for turn in turns]
    assert ["counted" in each["class"] for each in said] == [True, True, True, True, False]
    assert texts(said[1], "small")[0].endswith("tokens sampled, in the loss")
    assert texts(said[4], "small")[0].endswith("not in the loss: never delivered")
    read = len(encode("add the tens"))
    assert texts(turns[0], "marks") == [f"reward0.5advantage−0.500weightsv0read{read} tokenstime0.25 s"]
    assert "cached12 tokens" in texts(turns[1], "marks")[0]
    assert "endcut off by length" in texts(turns[4], "marks")[0]


def test_episodes_that_a_limit_ended_may_be_left_out_of_the_loss(tmp_path: Path) -> None:
    folder = make_agent_run(tmp_path)
    (folder / "config.yaml").write_text("rollout: {mask_truncated: true}\n")
    page = write_report(folder).path
    first = find(outline(page), "detail")[0]  # it ended by the limit of turns
    assert not find(first, "counted")
    assert texts(find(first, "said")[0], "small")[0].endswith("not in the loss: the episode was cut off")
    finished = "find((node) => node.tag === 'tr')[2].fire('click')"
    assert len(find(find(outline(page, finished), "detail")[0], "counted")) == 4


def test_breaks_branches_and_lost_answers_are_explained(page: Path) -> None:
    turns = find(find(outline(page), "detail")[0], "turn")
    notes = [texts(turn, "note") for turn in turns]
    assert notes[0] == []
    assert notes[1] == ["Continues turn 1, one of 2 branches."]
    assert notes[2] == [
        "Prefix break (template): the chat template renders the earlier messages differently now. "
        "A new root starts here."
    ]
    assert texts(turns[2], "context")[0].endswith("<think> all of it again")
    assert notes[3] == ["Continues turn 1, one of 2 branches."]
    assert notes[4] == ["This answer never reached its client. It is not trained on."]


def test_an_episode_says_how_it_ended_and_what_it_used(page: Path) -> None:
    (detail,) = find(outline(page), "detail")
    (chips,) = find(detail, "chips")
    assert "endingturn limit" in chips["text"]
    assert "tool errors1" in chips["text"]
    assert "weightsv0 (" in chips["text"]
    assert "prefix_breaks/template1" in find(detail, "stats")[0]["text"]
    assert texts(find(detail, "parts")[0], "tr") == ["right0", "style0.5", "reward0.5"]
    assert "Prompt" not in texts(detail, "h4")


def test_samples_are_filtered_and_searched_by_turns(page: Path) -> None:
    def shown(label: str, value: str) -> list[str]:
        script = f"const field = find((node) => node.attributes['aria-label'] === {label!r})[0]; "
        script += f"field.value = {value!r}; field.fire('change'); field.fire('input');"
        (listed,) = find(outline(page, script), "list")
        return texts(listed, "snippet")

    assert len(shown("Show", "all")) == 6
    assert len(shown("Show", "limit")) == 3
    assert len(shown("Show", "broken")) == len(shown("Show", "lost")) == len(shown("Show", "forked")) == 6
    assert len(shown("Search", "IT IS 42")) == 6
    assert shown("Search", "nowhere") == []
    assert shown("Sort", "turns")[0].startswith("5 × Let me check")


def test_hostile_turns_are_shown_as_text(tmp_path: Path) -> None:
    odd = make_turn(0, HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},))
    (turn,) = find(outline(write_report(make_agent_run(tmp_path, turns=(odd,))).path), "turn")
    assert find(turn, "tokens")[0]["text"] == decode(encode(HOSTILE)) + "<|im_end|>"
    assert HOSTILE[:60] in find(turn, "heard")[0]["text"]
    assert not find(turn, "script")
    assert not find(turn, "img")


def test_single_completions_look_as_before(tmp_path: Path) -> None:
    shown = outline(write_report(make_grpo_run(tmp_path, num_steps=3)).path)
    (detail,) = find(shown, "detail")
    assert texts(detail, "h4") == ["Prompt", "Answer", "Completion", "Rewards"]
    assert find(detail, "turns") == find(detail, "stats") == []
    assert len(find(detail, "tokens")) == 1
    assert "the weighted sum" in detail["text"]
    kinds = ["all", "learned from", "taught nothing", "held-out evaluation", "cut off by length", "a reward failed"]
    assert texts(find(shown, "controls")[0], "select")[1] == "".join([*kinds, "several versions"])


def with_agents(line: Node) -> Node:
    """A line whose first two turns are two agents', in the other order, and whose last turn another model's."""
    names = ["solver", "solver", "critic"]
    turns = line["turns"][:3]
    for turn, name, order in zip(turns, names, (0, 2, 1), strict=True):
        turn |= {"agent": name, "order": order}
    start = turns[2]["start"]
    turns[2] |= {"end": start, "text": "I doubt it.", "is_trained": False, "parent": None, "prefix_break": None}
    tokens = {key: line[key][:start] for key in ("token_ids", "logprobs", "pieces")}
    agents = {
        "solver": {"policy": "live", "learns": True, "reward": 1.0, "advantage": 0.5, "parts": {}},
        "critic": {"policy": "model x", "learns": False, "reward": None, "advantage": None, "parts": {}},
    }
    others = {"trainer_logprobs": None, "ref_logprobs": None, "turns": turns, "agents": agents}
    return {**line, **tokens, **others, "versions": [[1, 0, start]]}


def test_turns_of_several_agents_are_shown_in_the_order_of_arrival(tmp_path: Path) -> None:
    folder = make_agent_run(tmp_path / "agents", num_steps=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = [with_agents(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (detail,) = find(outline(write_report(folder).path), "detail")
    assert texts(detail, "h5") == ["Turn 1 · solver", "Turn 3 · critic", "Turn 2 · solver"]
    first, critic, _ = find(detail, "turn")
    assert find(critic, "tokens")[0]["text"] == "I doubt it."
    assert texts(critic, "who")[-1] == "criticnot in the loss: critic does not learn"
    assert "model x" in critic["text"]
    assert "in the loss" in texts(first, "who")[-1]


def test_the_table_of_a_league(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "league", num_steps=2, max_steps=2)
    row = {"rating": 941.4, "games": 1200, "wins": 900, "draws": 100, "losses": 200, "win_rate": 0.75}
    live = {**dict.fromkeys(row, 0), "rating": 1058.6, "win_rate": None}
    members = [{"member": "version <b>0</b>", **row}, {"member": "live", **live}]
    (folder / LEAGUE_TABLE).write_text(json.dumps({"step": 2, "rating": 1058.6, "members": members}))
    (table, *_) = [each for each in find(outline(write_report(folder).path), "table") if "win rate" in each["text"]]
    assert [texts(each, "td") for each in find(table, "tr")[1:]] == [
        ["941", "1,200", "900", "100", "200", "75.0%"],
        ["1059", "0", "0", "0", "0", "–"],
    ]
    assert [each["text"] for each in find(table, "th")][-2:] == ["version <b>0</b>", "live"]
