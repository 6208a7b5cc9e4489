"""Episodes of several turns in the report: what the page holds of them, within its bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent_folders import QUESTION, RESULT, make_agent_run, make_turn, make_turns, read_lines
from forge.observe.report import write_report
from forge.observe.report.turns import TurnTable, fair_limit, turns_of
from forge.types import MalformedCall, ToolCall
from run_folders import HOSTILE, make_grpo_run


class Data(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=False)
        self.tags: list[str] = []
        self.text, self._is_inside = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._is_inside = ("id", "data") in attrs

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        self.text += data if self._is_inside else ""


def page_of(folder: Path) -> Data:
    return Data(write_report(folder, clock=lambda: 1_790_000_100.0).path.read_text(encoding="utf-8"))


def data_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page_of(folder).text)
    return found


def test_an_item_has_its_turns(tmp_path: Path) -> None:
    samples = data_of(make_agent_run(tmp_path / "run"))["samples"]
    assert len(samples["items"]) == 6
    item = samples["items"][1]
    assert (item["ending"], item["numTurns"], item["stats"]["num_tool_errors"]) == ("finished", 5, 1.0)
    assert samples["items"][0]["ending"] == "turn_limit"
    first, second, third, fork, lost = item["turns"]
    assert [samples["messages"][number]["content"] for number in first["messages"]] == [m["content"] for m in QUESTION]
    assert first["calls"] == [{"id": "call_0_0", "name": "lookup", "arguments": '{"sum": "17+25"}'}]
    assert (first["reward"], second["reward"]) == (0.5, None)
    assert [turn["advantage"] for turn in item["turns"]] == [0.5, 1.5, 2.5, 3.5, 4.5]
    (told,) = (samples["messages"][number] for number in second["messages"])
    assert told == {"role": "tool", "content": RESULT["content"], "name": "lookup", "call": "call_0_0", "calls": ""}
    assert second["calls"] == [{"id": "call_1_0", "malformed": "it has no end"}]
    assert (second["cached"], second["parent"], second["context"]) == (12, 0, None)
    assert (third["parent"], third["previous"], third["break"]) == (None, 1, "template")
    assert third["context"] == "<think> all of it again"
    assert (fork["path"], fork["parent"], fork["messages"]) == ([0], 0, second["messages"])
    assert (lost["delivered"], lost["finish"], lost["seconds"]) == (False, "length", 1.25)
    spans = [(turn["start"], turn["end"]) for turn in item["turns"]]
    assert spans[0][0] == 0
    assert spans[-1][1] == item["numTokens"] == len(item["pieces"])
    assert "".join(item["pieces"][slice(*spans[1])]) == "wait<|im_end|>"
    assert [version for version, *_ in item["versions"]] == [0, 1, 2, 3, 4]


def test_tokens_that_the_trainer_did_not_get_have_none_of_its_logprobs(tmp_path: Path) -> None:
    items = data_of(make_agent_run(tmp_path / "run"))["samples"]["items"]
    for item in items:
        is_lost = [
            turn["start"] <= place < turn["end"] for turn in item["turns"][4:] for place in range(item["numTokens"])
        ]
        assert [value is None for value in item["trainer"]] == is_lost


def test_values_that_only_some_runs_record_are_there_where_they_were(tmp_path: Path) -> None:
    folder = make_agent_run(tmp_path / "run", num_steps=1)
    plain = data_of(folder)["samples"]["items"][0]
    assert not {"advantages", "values", "teacher"} & set(plain)
    path = folder / "rollouts" / "step_000001.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    own = [0.5 * place for place in range(len(line["token_ids"]))]
    path.write_text(json.dumps({**line, "token_advantages": own, "values": own, "teacher_logprobs": own[1:]}) + "\n")
    item = data_of(folder)["samples"]["items"][0]
    assert (item["advantages"], item["values"], "teacher" in item) == (own, own, False)  # those of other tokens are not


def test_messages_are_kept_once(tmp_path: Path) -> None:
    messages = data_of(make_agent_run(tmp_path / "run"))["samples"]["messages"]
    assert sorted(message["content"] for message in messages) == sorted(
        [*(each["content"] for each in QUESTION), RESULT["content"], "Again?"]
    )


def test_samples_of_one_completion_have_no_turns(tmp_path: Path) -> None:
    data = data_of(make_grpo_run(tmp_path / "run", num_steps=2))
    assert not any({"turns", "ending", "stats", "numTurns"} & set(item) for item in data["samples"]["items"])
    assert data["samples"]["messages"] == []
    assert "Episodes" not in {chart["section"] for chart in data["charts"]}


def test_metrics_of_episodes_have_charts(tmp_path: Path) -> None:
    charts = {c["title"]: c for c in data_of(make_agent_run(tmp_path / "run"))["charts"] if c["section"] == "Episodes"}
    assert list(charts) == ["Turns and tool calls", "Endings", "Faults", "Time of an episode"]
    assert [series["label"] for series in charts["Endings"]["series"]] == ["finished", "turn limit"]
    assert [series["label"] for series in charts["Faults"]["series"]] == ["all", "server"]


def test_hostile_turns_stay_text(tmp_path: Path) -> None:
    message = {"role": HOSTILE, "content": HOSTILE, "name": HOSTILE, "tool_call_id": HOSTILE, "tool_calls": [HOSTILE]}
    calls = (ToolCall(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}), MalformedCall(HOSTILE, HOSTILE, HOSTILE))
    odd = make_turn(0, HOSTILE, messages=(message,), calls=calls)
    hostile = page_of(make_agent_run(tmp_path / "odd", turns=(odd,)))
    assert hostile.tags == page_of(make_agent_run(tmp_path / "plain")).tags
    samples = json.loads(hostile.text)["samples"]
    assert samples["messages"][0]["content"] == HOSTILE
    assert samples["items"][0]["turns"][0]["calls"][1]["malformed"] == HOSTILE


def test_long_episodes_are_cut_and_the_page_says_so(tmp_path: Path) -> None:
    long = {"role": "user", "content": "x" * 5000}
    make_agent_run(tmp_path, turns=(make_turn(0, "wait", messages=(long, QUESTION[0])), *make_turns()[1:]))
    episodes = read_lines(tmp_path / "rollouts" / "step_000001.jsonl")
    table = TurnTable(episodes, max_turns=4, max_characters=400)
    fields = table.describe(episodes[0], limit=10, with_text=False)
    assert (len(fields["turns"]), fields["numTurns"]) == (5, 5)  # some are always shown
    assert table.messages[0]["content"] == "x" * 343 + " … (4657 more characters)"
    assert table.messages[1]["content"] == QUESTION[0]["content"]
    assert table.notes == ["Of long messages only the first 343 characters are shown."]
    many = [{"token_ids": [], "turns": [{"index": n, "start": 0, "end": 0} for n in range(50)]}]
    table = TurnTable(many, max_turns=20)
    assert [len(table.describe(each, limit=1, with_text=False)["turns"]) for each in many] == [20]
    assert table.notes == ["Of long episodes only the first 20 turns are shown."]


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ({}, True),
        ({"turns": None}, False),
        ({"turns": [3]}, False),
        ({"turns": [{"index": 0, "start": 0, "end": 1}]}, False),
        ({"turns": [{"index": 1, "start": 0, "end": 2}]}, False),
        ({"turns": [{"index": 0, "start": 0, "end": "2"}]}, False),
        ({"turns": [{"index": 0, "start": 0, "end": 2, "messages": 5, "calls": [1], "path": "x", "text": 3}]}, True),
    ],
)
def test_turns_that_do_not_fit_the_tokens_are_not_shown(change: dict[str, Any], is_kept: bool) -> None:
    episode = {"token_ids": [1, 2], "turns": [{"index": 0, "start": 0, "end": 2}], **change}
    assert bool(turns_of(episode)) == is_kept
    fields = TurnTable([episode]).describe(episode, limit=4, with_text=True)
    assert bool(fields) == is_kept


def test_tokens_without_pieces_are_shown_as_text(tmp_path: Path) -> None:
    folder = make_agent_run(tmp_path / "run", num_steps=1)
    path = folder / "rollouts" / "step_000001.jsonl"
    lines = [{**line, "pieces": None} for line in read_lines(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    item = data_of(folder)["samples"]["items"][0]
    assert item["pieces"] == []
    assert [turn["text"] for turn in item["turns"]] == [turn.text for turn in make_turns()]


def test_the_limit_is_fair() -> None:
    assert fair_limit([5, 100, 200], 105, fewest=1) == 50
    assert fair_limit([5, 6], 100, fewest=1) == 6
    assert fair_limit([50, 50], 10, fewest=8) == 8
    assert fair_limit([], 10, fewest=8) == 0


def test_a_record_has_the_whole_context_after_a_prefix_break_alone(tmp_path: Path) -> None:
    broken = replace(make_turns()[2], index=0, previous=None, prefix_break="compaction")
    (line, _) = read_lines(make_agent_run(tmp_path, num_steps=1, turns=(broken,)) / "rollouts" / "step_000001.jsonl")
    assert line["turns"][0]["context"] == "<think> all of it again"


def test_turns_of_several_agents_say_whose_they_are() -> None:
    """A turn of another model has no tokens: its text is kept as it is."""
    first = {"index": 0, "start": 0, "end": 2, "text": "ab", "agent": "solver", "order": 0, "messages": []}
    other = {"index": 1, "start": 2, "end": 2, "text": "No.", "agent": "critic", "order": 1, "messages": []}
    agents = {
        "solver": {"policy": "live", "learns": True, "reward": 1.0, "advantage": 0.5, "parts": {}},
        "critic": {"policy": "endpoint x", "learns": False, "reward": None, "advantage": None, "parts": {}},
    }
    line = {"token_ids": [1, 2], "turns": [first, other], "agents": agents}
    found = TurnTable([line]).describe(line, limit=10, with_text=False)
    assert [(turn["agent"], turn["order"], turn["text"]) for turn in found["turns"]] == [
        ("solver", 0, None),
        ("critic", 1, "No."),
    ]
    assert found["agents"]["critic"] == {"policy": "endpoint x", "learns": False, "reward": None, "advantage": None}
    alone = {"token_ids": [1, 2], "turns": [{**first, "agent": None, "order": None}]}
    described = TurnTable([alone]).describe(alone, limit=10, with_text=False)
    assert (described["agents"], described["turns"][0]["agent"]) == ({}, "")
