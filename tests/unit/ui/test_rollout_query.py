"""Filters, order and search over rollouts give what a simple loop over the lines gives."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_folders import make_agent_groups
from forge.config import RecordConfig
from forge.envs.chat_api.errors import RequestError
from forge.rollout.record import RolloutRecorder
from forge.ui.rollouts import query
from forge.ui.rollouts.index import RolloutIndex, RolloutRows
from forge.ui.rollouts.lines import FLAGS
from forge.ui.rollouts.query import (
    SORTS,
    Filters,
    SampleName,
    all_of,
    arrange,
    conditions,
    counts_of,
    histograms,
    name_row,
)
from forge.ui.rollouts.search import NO, UNKNOWN, YES, TextSearch, text_of
from run_folders import HOSTILE, decode, trainer_logprobs, write_other_rollouts, write_rollouts

Fields = dict[str, Any]
Index = tuple[RolloutIndex, RolloutRows, list[Fields]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """An index over all sorts of rollouts, and the lines in the order of its rows."""
    folder = tmp_path_factory.mktemp("run")
    write_rollouts(folder, range(1, 13), num_groups=3)
    write_other_rollouts(folder, range(10, 13))
    recorder = RolloutRecorder(
        folder / "rollouts", decode=decode, config=RecordConfig(trainer_logprobs=True), resume_step=12
    )
    groups = make_agent_groups(14)
    recorder.write(14, groups, trainer_logprobs(groups))
    index = RolloutIndex(folder)
    while not (index.advance(), index.is_complete)[1]:
        pass
    rows = index.rows()
    lines = [index.read_fields(rows, row) for row in range(len(rows))]
    known = [line for line in lines if line is not None]
    assert len(known) == len(rows) == 12 * 12 + 24 + 2
    return index, rows, known


def select(rows: RolloutRows, **given: str) -> set[int]:
    filters = Filters.of(given)
    return set(np.flatnonzero(all_of(rows, conditions(rows, filters))).tolist())


def gap(line: Fields) -> float:
    if line["trainer_logprobs"] is None:
        return math.nan
    pairs = list(zip(line["trainer_logprobs"], line["logprobs"], strict=True))
    turns = line.get("turns") or [{"start": 0, "end": len(pairs), "is_delivered": True}]
    learned = [pair for turn in turns if turn["is_delivered"] for pair in pairs[turn["start"] : turn["end"]]]
    return max(abs(one - other) for one, other in learned)


TESTS: dict[str, tuple[dict[str, str], Callable[[Fields], bool]]] = {
    "reward from": ({"reward": "1.1~"}, lambda line: line["reward"] >= 1.1),
    "reward to": ({"reward": "~0.1"}, lambda line: line["reward"] <= 0.1),
    "one step": ({"step": "11"}, lambda line: line["step"] == 11),
    "steps": ({"step": "3~5"}, lambda line: 3 <= line["step"] <= 5),
    "length": ({"tokens": "20~40"}, lambda line: 20 <= len(line["token_ids"]) <= 40),
    "advantage": ({"advantage": "0.2~"}, lambda line: line["advantage"] >= 0.2),
    "turns": ({"turns": "2~"}, lambda line: len(line.get("turns", [1])) >= 2),
    "version": ({"version": "4~5"}, lambda line: any(4 <= v <= 5 for v, *_ in line["versions"])),
    "gap": ({"gap": "0.5~"}, lambda line: gap(line) >= 0.5),
    "learned from": ({"outcome": "trained"}, lambda line: line["outcome"] == "trained"),
    "held out": ({"outcome": "evaluation"}, lambda line: line["outcome"] == "evaluation"),
    "taught nothing": ({"outcome": "fruitless"}, lambda line: line["outcome"] == "no_signal"),
    "no signal": ({"outcome": "no_signal"}, lambda line: line["outcome"] == "no_signal"),
    "another outcome": ({"outcome": "nothing"}, lambda line: False),
    "cut off": ({"flags": "cut"}, lambda line: line["finish_reason"] == "length"),
    "failed": ({"flags": "failed"}, lambda line: bool(line["failures"])),
    "two flags": ({"flags": "mixed,cut"}, lambda line: line["finish_reason"] == "length" and len(line["versions"]) > 1),
    "a limit": ({"flags": "limit"}, lambda line: line.get("ending") == "turn_limit"),
    "ending": ({"ending": "stop"}, lambda line: not line.get("turns") and line["finish_reason"] == "stop"),
    "ending of a program": ({"ending": "finished"}, lambda line: line.get("ending") == "finished"),
    "tool": ({"tool": "lookup"}, lambda line: bool(line.get("turns"))),
    "another tool": ({"tool": "search"}, lambda line: False),
    "prompt": ({"prompt": "arithmetic:0:4"}, lambda line: line["prompt_id"] == "arithmetic:0:4"),
    "several": ({"reward": "1~", "step": "~4"}, lambda line: line["reward"] >= 1 and line["step"] <= 4),
}  # fmt: skip


@pytest.mark.parametrize("name", TESTS)
def test_filters(found: Index, name: str) -> None:
    _, rows, lines = found
    given, test = TESTS[name]
    expected = {row for row, line in enumerate(lines) if test(line)}
    assert select(rows, **given) == expected
    assert expected or name in ("another outcome", "another tool", "two flags")


@pytest.mark.parametrize("sort", SORTS)
def test_orders(found: Index, sort: str) -> None:
    _, rows, lines = found
    wanted = all_of(rows, conditions(rows, Filters.of({"outcome": "trained"})))
    order = arrange(rows, wanted, sort).tolist()
    assert sorted(order) == np.flatnonzero(wanted).tolist()
    keys: dict[str, Callable[[Fields], float]] = {
        "best": lambda line: -line["reward"],
        "worst": lambda line: line["reward"],
        "advantage": lambda line: -abs(float(np.float32(line["advantage"]))),
        "long": lambda line: -len(line["token_ids"]),
        "short": lambda line: len(line["token_ids"]),
        "turns": lambda line: -len(line.get("turns", [1])),
        "oldest": lambda line: 0.0,
        "newest": lambda line: 0.0,
    }
    sign = 1 if sort == "oldest" else -1
    if sort == "gap":
        gaps = rows.columns["gap"][order]
        assert (np.diff(gaps) <= 0).all()
        return
    places = [
        (keys[sort](lines[row]), sign * lines[row]["step"], lines[row]["group"], lines[row]["index"]) for row in order
    ]
    assert places == sorted(places)


def test_rows_in_another_order_than_their_file_are_sorted(tmp_path: Path) -> None:
    write_rollouts(tmp_path, range(1, 4))
    chance = random.Random(3)
    for path in tmp_path.glob("rollouts/*"):
        lines = path.read_bytes().splitlines(keepends=True)
        chance.shuffle(lines)
        path.write_bytes(b"".join(lines))
    index = RolloutIndex(tmp_path)
    index.advance()
    rows = index.rows()
    assert not rows.is_ordered
    for sort, sign in (("oldest", 1), ("newest", -1)):
        order = arrange(rows, np.ones(len(rows), np.bool_), sort)
        names = [tuple(map(int, name_row(rows, int(row)).split(".")[1:])) for row in order]
        assert names == sorted(names, key=lambda name: (sign * name[0], *name[1:]))


def test_histograms_leave_their_own_filter_out(found: Index) -> None:
    _, rows, lines = found
    conditions_found = conditions(rows, Filters.of({"step": "1~6", "reward": "1~"}))
    plots = histograms(rows, conditions_found)
    assert sum(plots["step"]["counts"]) == len(select(rows, reward="1~"))
    assert sum(plots["reward"]["counts"]) == len(select(rows, step="1~6"))
    assert sum(plots["tokens"]["counts"]) == len(select(rows, step="1~6", reward="1~"))
    assert (plots["step"]["low"], plots["step"]["high"], len(plots["step"]["counts"])) == (0.5, 14.5, 14)
    per_step = [sum(line["step"] == step and line["reward"] >= 1 for line in lines) for step in range(1, 15)]
    assert plots["step"]["counts"] == per_step
    assert histograms(rows, conditions(rows, Filters.of({"tool": "none"})))["tokens"] is None
    one = query._histogram(np.array([2.5, 2.5, math.nan]))
    assert one == {"low": 2.5, "high": 2.5, "counts": [2]}
    for low, high in ((0.3, 0.1 + 0.2), (-1e300, math.nextafter(-1e300, 0)), (0.0, 5e-324), (1.0, 1.0 + 1e-14)):
        close = query._histogram(np.array([low, high, high]))  # too close for 48 bars
        assert close is not None
        assert sum(close["counts"]) == 3
    wide = query._histogram(np.arange(100_000))
    assert wide is not None
    assert (wide["low"], sum(wide["counts"]), len(wide["counts"])) == (-0.5, 100_000, 48)
    assert (wide["high"] - wide["low"]) / 48 == round((wide["high"] - wide["low"]) / 48)


def test_what_there_is(found: Index) -> None:
    _, rows, lines = found
    words = counts_of(rows)
    assert words["outcomes"] == {"evaluation": 12, "trained": 146, "no_signal": 12}
    assert words["endings"]["finished"] == 1
    assert words["tools"] == ["lookup"]
    assert words["flags"]["failed"] == sum(bool(line["failures"]) for line in lines)


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"reward": "x"}, "reward"), ({"reward": "1~nan"}, "reward"), ({"step": "1~2~3"}, "step"),
        ({"flags": "cut,none"}, "flags"), ({"q": "x" * 401}, "q"), ({"tool": "x" * 501}, "tool"),
    ],
)  # fmt: skip
def test_filters_that_have_no_meaning_are_refused(given: dict[str, str], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        Filters.of(given)
    assert caught.value.param == parameter


@pytest.mark.parametrize(
    "text",
    [
        "", "step", "step.1.2", "step.1.2.3.4", "other.1.2.3", "step.-1.2.3", "step.1.x.3", "step.1.2." + "9" * 30,
        "step.١.2.3",
    ],
)  # fmt: skip
def test_names_of_samples_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        SampleName.of(text, parameter="name")
    assert caught.value.param == "name"
    assert SampleName.of("evaluation.3.20.1", parameter="name") == SampleName(("evaluation", 3), 20, 1)


# ---- Search ----------------------------------------------------------------------------------------------------------


def searched(index: RolloutIndex, rows: RolloutRows, text: str) -> set[int]:
    search, order = TextSearch(index, text), np.arange(len(rows))
    while (search.known(rows) == UNKNOWN).any():
        search.advance(rows, order, seconds=0.05)
    return set(np.flatnonzero(search.known(rows) == YES).tolist())


@pytest.mark.parametrize(
    "text",
    [
        "größe", "GRÖßE", "🙂", "check AGAIN", "arithmetic:0:4", "17 + 25", "it is 42", "17+25", "lookup",
        "it has no end", "<|im_end|>", "<think>", "no completion has this", "token_ids", "logprobs", '": "', "e",
        "\n the result is", "\\n", 'a "quoted" text', "-0.1", "trained", "all of it again", "assistant", "user",
    ],
)  # fmt: skip
def test_search_finds_what_the_texts_have_and_nothing_else(found: Index, text: str) -> None:
    index, rows, lines = found
    expected = {row for row, line in enumerate(lines) if text.lower() in text_of(line).lower()}
    assert searched(index, rows, text) == expected
    if text in ("token_ids", "logprobs", "trained", "no completion has this"):
        assert not expected  # they stand in every line, but not in its texts


def test_the_texts_of_a_line_are_all_that_a_reader_sees(found: Index) -> None:
    _, _, lines = found
    line = next(line for line in lines if line.get("turns"))
    text = text_of(line)
    for word in (
        "Use the tool lookup.",
        "it is 42",
        '{"sum": "17+25"}',
        "Again?",
        "carry one",
        "42",
        "lookup:14",
        "it has no end",
    ):
        assert word in text


def test_search_of_hostile_text(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1])
    path = tmp_path / "rollouts" / "step_000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    odd = {**json.loads(lines[0]), "text": HOSTILE, "prompt": [{"role": "user", "content": [{"text": "deep <b>"}]}, 3]}
    path.write_bytes(
        json.dumps(odd, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n" + b"".join(lines[1:])
    )
    index = RolloutIndex(tmp_path)
    index.advance()
    rows = index.rows()
    for text in ("</script><script>", "onerror=alert(1)", "\u2028", "\x00", "deep <b>"):
        assert searched(index, rows, text) == {0}


def test_a_search_continues_while_lines_come_and_starts_over_when_they_go(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [1, 2])
    index = RolloutIndex(tmp_path)
    index.advance()
    search, rows = TextSearch(index, "result"), index.rows()
    ticks = iter(range(10_000))
    stepping = TextSearch(index, "result", clock=lambda: float(next(ticks)))
    stepping.advance(rows, np.arange(len(rows)), seconds=2)
    assert 0 < (stepping.known(rows) != UNKNOWN).sum() < len(rows)  # a part at a time
    search.advance(rows, np.arange(len(rows)), seconds=60)
    before = search.known(rows).copy()
    assert set(before.tolist()) <= {NO, YES}
    writer = RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=2)
    groups = make_agent_groups(3)
    writer.write(3, groups)
    index.advance()
    rows = index.rows()
    known = search.known(rows)
    assert known.tolist() == [*before.tolist(), UNKNOWN, UNKNOWN]
    RolloutRecorder(tmp_path / "rollouts", decode=decode, config=RecordConfig(), resume_step=1)
    index.advance()
    rows = index.rows()
    assert set(search.known(rows).tolist()) == {UNKNOWN}


def test_flags_have_a_bit_each() -> None:
    assert len({*FLAGS.values()}) == len(FLAGS)
    assert all(bit.bit_count() == 1 for bit in FLAGS.values())
