"""The games of self-play and the solver with its critic: their rules, known values, and a few steps of each."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import random
import runpy
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from forge.config import GRPOConfig, SFTConfig, load
from forge.envs.episode import EpisodeRun
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.testing import play
from forge.types import Task
from grpo_runs import episodes, metrics, train_here

APPS = Path(__file__).parents[2] / "apps"
PROGRAMS = {"selfplay/kuhn": "kuhn", "selfplay/tictactoe": "tictactoe", "critic": "offers"}


def program_of(app: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(APPS / app))
    return importlib.import_module(PROGRAMS[app])


@pytest.fixture
def kuhn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return program_of("selfplay/kuhn", monkeypatch)


@pytest.fixture
def tictactoe(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return program_of("selfplay/tictactoe", monkeypatch)


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return program_of("critic", monkeypatch)


def run(program: Any, answers: Mapping[str, list[str]], **metadata: Any) -> EpisodeRun:
    task = Task("game", ({"role": "user", "content": "?"},), answer=metadata.pop("answer", None), metadata=metadata)
    return asyncio.run(play(program, answers, task=task))


def rewards(done: EpisodeRun) -> dict[str, float]:
    return {name: result.score.reward for name, result in done.agents.items() if result.score is not None}


# ---- Kuhn poker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deal", "first", "second", "won"),
    [
        ("KQ", ["k"], ["q"], 1.0),  # check, check
        ("QK", ["q"], ["k"], -1.0),
        ("JQ", ["J"], ["q"], 1.0),  # bet, fold: a bluff
        ("JQ", ["J"], ["Q"], -2.0),  # bet, call
        ("KQ", ["k", "K"], ["Q"], 2.0),  # check, bet, call
        ("QJ", ["q", "q"], ["J"], -1.0),  # check, bet, fold
        ("KQ", ["bet"], [], -2.0),  # not an answer
        ("KQ", ["Q"], [], -2.0),  # another card than its own
        ("KQ", ["K"], ["Q "], 2.0),
    ],
)
def test_a_hand_of_kuhn_poker(kuhn: ModuleType, deal: str, first: list[str], second: list[str], won: float) -> None:
    done = run(kuhn.kuhn, {"first": first, "second": second}, deal=list(deal))
    assert rewards(done) == {"first": won, "second": -won}
    read = {
        name: " ".join(m["content"] for turn in done.turns if turn.agent == name for m in turn.messages)
        for name in ("first", "second")
    }
    for name, own, other in (("first", *deal), ("second", deal[1], deal[0])):
        assert f"You have {other}" not in read[name], "the other's card is private"
        assert not read[name] or f"You have {own}" in read[name]


def test_exploitability_has_the_known_values(kuhn: ModuleType) -> None:
    for bluff in (0.0, 0.1, 0.25, 1 / 3):
        policy = kuhn.equilibrium(bluff)
        assert kuhn.exploitability(policy) == pytest.approx(0.0, abs=1e-12)
        assert kuhn.expected(policy, policy) == pytest.approx(-1 / 18)
    assert kuhn.exploitability(kuhn.equilibrium(0.5 / 3) | {("Q", ("bet",)): {"call": 1.0, "fold": 0.0}}) > 0.01
    assert kuhn.exploitability(kuhn.uniform()) == pytest.approx(11 / 24)
    assert kuhn.best_response(kuhn.uniform(), player=0)[0] == pytest.approx(1 / 2)
    assert kuhn.best_response(kuhn.uniform(), player=1)[0] == pytest.approx(5 / 12)


def test_a_best_response_is_the_best_of_all_pure_strategies(kuhn: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(3):
        policy = {}
        for card, played in kuhn.INFORMATION_SETS:
            chances = [rng.random() for _ in range(3)]  # the last are illegal answers
            policy[card, played] = dict(zip(kuhn.LEGAL[played], (c / sum(chances) for c in chances), strict=False))
        for player in (0, 1):
            own = [place for place in kuhn.INFORMATION_SETS if len(place[1]) % 2 == player]
            values = []
            for moves in itertools.product(*(kuhn.LEGAL[played] for _, played in own)):
                pure = policy | {place: {move: 1.0} for place, move in zip(own, moves, strict=True)}
                values.append(kuhn.expected(pure, policy) if player == 0 else -kuhn.expected(policy, pure))
            value, chosen = kuhn.best_response(policy, player=player)
            assert value == pytest.approx(max(values))
            pure = policy | {place: {move: 1.0} for place, move in chosen.items()}
            again = kuhn.expected(pure, policy) if player == 0 else -kuhn.expected(policy, pure)
            assert again == pytest.approx(value)
            assert kuhn.ILLEGAL not in chosen.values()


def test_an_average_plays_like_a_draw_of_its_policies(kuhn: ModuleType) -> None:
    one, other, against = kuhn.equilibrium(0.0), kuhn.uniform(), kuhn.equilibrium(1 / 3)
    mean = kuhn.averaged([one, other])
    for values in ([kuhn.expected(each, against) for each in (mean, one, other)],):
        assert values[0] == pytest.approx((values[1] + values[2]) / 2)
    assert kuhn.expected(against, mean) == pytest.approx(
        (kuhn.expected(against, one) + kuhn.expected(against, other)) / 2
    )


def test_demonstrations_of_kuhn_poker_are_uniform(kuhn: ModuleType, tmp_path: Path) -> None:
    lines = (kuhn.write_files(tmp_path) / "demonstrations.jsonl").read_text().splitlines()
    last = [json.loads(line)["messages"] for line in lines]
    told = [(messages[-2]["content"], messages[-1]["content"]) for messages in last if len(messages) == 2]
    bold = [answer for question, answer in told if question == "You have K. They bet."]
    assert 0.45 < bold.count("K") / len(bold) < 0.55
    assert set(bold) == {"K", "k"}


# ---- Tic-tac-toe ----------------------------------------------------------------------------------------------------


def test_a_game_of_tictactoe(tictactoe: ModuleType) -> None:
    won = run(tictactoe.tictactoe, {"x": ["5", "1", "9"], "o": ["2", "3"]}, board="123456789")
    assert rewards(won) == {"x": 1.0, "o": -1.0}
    assert [turn.messages[0]["content"] for turn in won.turns if turn.agent == "o"] == ["o: 1234x6789", "o: xo34x6789"]
    assert all(turn.parent is None for turn in won.turns), "every board is a conversation of its own"
    taken = run(tictactoe.tictactoe, {"x": ["5"], "o": ["5"]}, board="123456789")
    assert rewards(taken) == {"x": 1.0, "o": -1.0}
    drawn = run(tictactoe.tictactoe, {"x": ["9"], "o": []}, board="xoxxooox9")
    assert rewards(drawn) == {"x": 0.0, "o": 0.0}


def test_outcomes_of_tictactoe_have_the_known_values(tictactoe: ModuleType) -> None:
    boards = tictactoe.boards()
    assert len(boards) == 4520
    assert tictactoe.best_value(tictactoe.EMPTY) == 0
    uniform = {board: tictactoe.random_player(board) for board in boards}
    perfect = {board: tictactoe.perfect_player(board) for board in boards}
    as_x = tictactoe.outcome(uniform, tictactoe.random_player, side="x")
    assert as_x == pytest.approx((0.58492, 0.12698, 0.28810), abs=1e-5)
    assert tictactoe.outcome(uniform, tictactoe.random_player, side="o") == pytest.approx(as_x[::-1])
    assert tictactoe.both_sides(perfect, tictactoe.perfect_player) == pytest.approx((0.0, 1.0, 0.0))
    assert tictactoe.both_sides(perfect, tictactoe.random_player)[2] == pytest.approx(0.0)
    silent = {board: dict.fromkeys(tictactoe.free(board), 0.0) for board in boards}
    assert tictactoe.both_sides(silent, tictactoe.random_player) == pytest.approx((0.0, 0.0, 1.0))


# ---- Solver and critic ----------------------------------------------------------------------------------------------


def test_only_the_critics_word_tells_the_solver(offers: ModuleType) -> None:
    task = {"numbers": [3, 7, 5], "answer": "7"}
    done = run(offers.review, {"solver": ["5", "7"], "critic": ["more"]}, **task)
    assert rewards(done) == {"solver": 1.0, "critic": 1.0}
    read = [m["content"] for turn in done.turns if turn.agent == "solver" for m in turn.messages]
    assert read == ["Offer one: 3 7 5", "more"]
    wrong = run(offers.review, {"solver": ["5", "3"], "critic": ["less"]}, **task)
    assert rewards(wrong) == {"solver": 0.0, "critic": 0.0}
    named = run(offers.review, {"solver": ["5", "7"], "critic": ["7"]}, **task)
    assert rewards(named) == {"solver": 1.0, "critic": -1.0}
    read = [m["content"] for turn in named.turns if turn.agent == "solver" for m in turn.messages]
    assert read == ["Offer one: 3 7 5", "again"], "the critic cannot name the number"
    for wanted, offer in itertools.product([3, 5, 7], repeat=2):
        assert wanted in offers.fitting([3, 5, 7], offer, offers.right_word(wanted, offer))
        assert offers.fitting([3, 5, 7], 5, offers.right_word(wanted, 5)) == [wanted], "the middle number tells most"


def test_held_out_pairs_are_not_trained_on(offers: ModuleType, tmp_path: Path) -> None:
    files = offers.write_files(tmp_path / "a", seed=1)
    again = offers.write_files(tmp_path / "b", seed=1)
    names = ("demonstrations.jsonl", "prompts.jsonl", "heldout.jsonl")
    opened = {}
    for name in names:
        assert (files / name).read_bytes() == (again / name).read_bytes()
        lines = (files / name).read_text().splitlines()
        opened[name] = {json.loads(line)["messages"][0]["content"] for line in lines}
    assert not opened["heldout.jsonl"] & (opened["prompts.jsonl"] | opened["demonstrations.jsonl"])


# ---- Runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("app", PROGRAMS)
def test_a_few_steps_and_the_report(app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(app, monkeypatch)
    files = program.write_files(tmp_path / "task", seed=3)
    places = [f"run.output_dir={tmp_path}", f"prompts.sources.0.path={files}/prompts.jsonl", "record.report=false"]
    if app == "critic":
        places += [f"evaluation.sources.0.path={files}/heldout.jsonl", "evaluation.max_prompts=2"]
    config = load(
        GRPOConfig,
        files=[APPS / app / "grpo.yaml"],
        overrides=[
            *("model.path=null", "model.preset=tiny", "model.num_layers=1", "run.seed=3", "record.rollouts=all"),
            *("rollout.batch_groups=2", "rollout.group_size=2", "rollout.no_signal=keep", "training.max_steps=2"),
            *(*places, "training.warmup_steps=0", "algorithm.kl.coefficient=0"),  # a reference needs another process
        ],
    )
    assert train_here(config).step == 2
    made = [each for each in episodes(config) if each["outcome"] == "trained"]
    assert len(made) == 8
    names = {"selfplay/kuhn": "first", "selfplay/tictactoe": "o", "critic": "critic"}
    assert len(metrics(config, f"episode/agents/{names[app]}/reward")) == 2
    sft = load(SFTConfig, files=[APPS / app / "sft.yaml"])
    num_shown = len((files / "demonstrations.jsonl").read_text().splitlines())
    assert num_shown >= sft.training.batch_size * (sft.training.max_steps or 0)
    if app == "selfplay/kuhn":
        folder = tmp_path / config.run.name
        monkeypatch.setattr("sys.path", list(importlib.import_module("sys").path))
        main = runpy.run_path(str(APPS / app / "main.py"), run_name="app")
        text = main["report"](folder / "checkpoints" / "hf", folder)
        found = json.loads((folder / "exploitability.json").read_text())
        assert list(found["curve"]) == ["0", "2"]
        assert found["curve"]["2"] == pytest.approx(2.0, abs=0.01), "noise is never a legal move, and loses two chips"
        assert f"{found['curve']['2']:.4f} after 2 steps" in text


def test_probabilities_of_moves_are_those_of_another_implementation(
    kuhn: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(str(APPS / "selfplay"))
    moves = importlib.import_module("moves")
    make_tiny(tmp_path, num_layers=1, hidden_size=32, intermediate_size=32)
    question = (kuhn.seen("Q", ("check", "bet")), ["Q", "call"])
    with moves.MoveReader(tmp_path) as reader:
        (found,) = reader.probabilities([question])
    codec, model = ChatTokenizer.load(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for answer, chance in found.items():
        prompt = list(codec.encode_prompt(question[0]))
        ids = [*prompt, *codec.encode_rendered(answer), codec.stop_token_ids[0]]
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = sum(float(logprobs[place - 1, ids[place]]) for place in range(len(prompt), len(ids)))
        assert math.log(chance) == pytest.approx(wanted, abs=1e-3)
