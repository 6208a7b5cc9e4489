"""Gymnasium and TextArena: observations, actions, options, and the processes that they run in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import psutil
import pytest

import gymnasium_envs
import textarena_envs
from external_envs import Unavailable, venv_or_unavailable
from forge import Task
from forge.envs.environment import load_program
from forge.envs.episode import EpisodeRun
from forge.envs.external.gymnasium import KIND, GymnasiumOptions
from forge.envs.external.hosted import HostedProcess
from forge.envs.external.processes import close_servers, pool_of
from forge.envs.limits import Fault
from forge.errors import OptionError
from forge.testing import play

Drive = Callable[[Coroutine[Any, Any, Any]], Any]
TASK = Task("game:1", ({"role": "user", "content": "Play."},), metadata={"seed": 7})


@pytest.fixture(scope="module")
def drive() -> Iterator[Drive]:
    """Run coroutines on one loop, so that all tests share one server of each kind."""
    with asyncio.Runner() as runner:
        try:
            for requirements in (gymnasium_envs.REQUIREMENTS, textarena_envs.REQUIREMENTS):
                venv_or_unavailable(requirements)
        except Unavailable as reason:
            pytest.skip(str(reason))
        yield runner.run
        runner.run(close_servers())


async def gym(name: str, answers: Sequence[str], task: Task = TASK, **args: Any) -> EpisodeRun:
    program = load_program("gymnasium", {**gymnasium_envs.COMMON, "id": name, **args})
    return await play(program, answers, task=task)


async def arena(name: str, answers: Sequence[str], task: Task = TASK, **args: Any) -> EpisodeRun:
    program = load_program("textarena", {**textarena_envs.COMMON, "id": name, **args})
    return await play(program, answers, task=task)


def read(run: EpisodeRun) -> list[str]:
    return [turn.messages[-1]["content"] for turn in run.turns]


def test_frozen_lake_is_drawn_with_the_player_in_brackets(drive: Drive) -> None:
    args = {"make": {"is_slippery": False}, "observe": "render", "actions": gymnasium_envs.PATHS}
    run = drive(gym("FrozenLake-v1", ["right", "down"], **args))
    assert read(run)[0] == (
        "Play.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with one action: 0 or left, 1 or down, 2 or right, 3 or up."
    )
    assert read(run)[1].splitlines()[-4:] == ["S[F]FF", "FHFH", "FFFH", "HFFG"]
    assert (run.score.reward, run.outcome) == (0.0, "finished")


def test_functions_of_ours_show_and_read(drive: Drive) -> None:
    args = {"observe": "troubled_gym:show_taxi", "act": "troubled_gym:read_taxi", "make": {"max_episode_steps": 3}}
    run = drive(gym("Taxi-v4", ["south", "x", "North!", "pick up"], **args))
    assert read(run)[0].startswith("Play.\n\ntaxi at ")
    assert read(run)[2] == "Error: this is not an action: expected s, n, e, w, p or d."
    assert run.outcome == "truncated"
    assert run.turn_rewards == {0: -1.0, 2: -1.0, 3: -10.0}


def test_values_are_shown_as_they_are_and_the_seed_decides(drive: Drive) -> None:
    first, again = (drive(gym("Blackjack-v1", ["0"])) for _ in range(2))
    assert read(first) == read(again)
    mine, dealers, ace = map(int, read(first)[0].split("\n\n")[1].split(", "))
    assert 4 <= mine <= 21
    assert 1 <= dealers <= 10
    assert ace in (0, 1)
    others = {read(drive(gym("Blackjack-v1", ["0"], Task(f"other:{each}"))))[0] for each in range(4)}
    assert len(others) > 1


def test_answers_that_are_not_actions(drive: Drive) -> None:
    answers = ["[0.5]", "[9]", "[1, 2]", "[NaN]", "fast"]
    run = drive(gym("Pendulum-v1", answers, invalid_reward=-0.25, max_invalid=4))
    assert read(run)[2:] == ["Error: this is not an action: expected a JSON array of the shape [1]."] * 3
    assert (run.outcome, len(run.turns)) == ("truncated", 5)
    assert [run.turn_rewards[number] for number in range(1, 5)] == [-0.25] * 4


def test_the_action_is_where_the_pattern_says_and_never_in_the_reasoning(drive: Drive) -> None:
    args = {"make": {"is_slippery": False}, "actions": gymnasium_envs.PATHS}
    run = drive(gym("FrozenLake-v1", ["<think>up</think>right", "2 holes: down"], **args, max_invalid=1))
    assert (len(run.turns), run.outcome) == (2, "truncated")
    run = drive(gym("FrozenLake-v1", ["<a>up</a> or <a>right</a>", "<a>down</a>"], pattern="<a>(.*?)</a>", **args))
    assert (len(run.turns), run.outcome) == (2, "finished")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": "Frozen-v1"}, "Frozen"),
        ({"id": "no_such_module:Lake-v1"}, "no_such_module"),
        ({"make": {"colour": "red"}}, "colour"),
        ({"actions": ["left"]}, "each action"),
        ({"observe": "troubled_gym:nothing"}, "nothing"),
        ({"observe": "render", "id": "Pendulum-v1"}, "Pendulum"),
    ],
)
def test_options_that_the_environment_refuses_end_the_run(drive: Drive, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        drive(gym(**{"name": "FrozenLake-v1", "answers": [], **change}))
    assert caught.value.path == "episode.args"


def test_options_are_checked_before_anything_starts() -> None:
    with pytest.raises(OptionError, match="speed"):
        load_program("gymnasium", {"id": "FrozenLake-v1", "speed": 3})
    with pytest.raises(OptionError, match="id"):
        load_program("gymnasium", {})
    with pytest.raises(OptionError, match="seat must be below players"):
        asyncio.run(play(load_program("textarena", {"id": "TicTacToe-v0", "seat": 1}), []))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"gymnasium is not installed") as caught:
        asyncio.run(play(load_program("gymnasium", {"id": "FrozenLake-v1"}), []))
    assert "torchforge[gymnasium]" in str(caught.value)


def test_an_exception_of_the_environment_is_a_fault(drive: Drive) -> None:
    with pytest.raises(Fault, match="RuntimeError: the environment is broken") as caught:
        drive(gym("troubled_gym:Troubled-v0", ["raise"]))
    assert caught.value.kind == "gymnasium_error"


def test_a_stuck_process_is_killed_when_its_episode_has_ended(drive: Drive) -> None:
    options = GymnasiumOptions(id="", **gymnasium_envs.COMMON)

    async def scenario() -> None:
        stuck = HostedProcess(KIND, options)
        await stuck.start()
        made = {"env": "troubled_gym:Troubled-v0", "make": {}, "seed": 1, "options": None, "observe": None, "act": None}
        await stuck.ask("reset", limit_s=240.0, actions=(), pattern=None, **made)
        child = psutil.Process(int((await stuck.ask("step", text="pid"))["text"]))
        server = child.parent()
        assert server is not None
        with pytest.raises(Fault, match="took longer than 1 s for step"):
            await stuck.ask("step", limit_s=1.0, text="hang")
        assert child.is_running()
        await stuck.close()
        assert (await asyncio.to_thread(psutil.wait_procs, [child], 60))[1] == []
        assert server.is_running()
        assert len(pool_of(KIND.spec(options)).servers) == 1

    drive(scenario())


def test_what_an_episode_has_started_ends_with_it(drive: Drive) -> None:
    with pytest.raises(Fault) as caught:
        drive(gym("troubled_gym:Troubled-v0", ["child", "crash"]))
    assert caught.value.kind == "gymnasium_lost"
    run = drive(gym("troubled_gym:Troubled-v0", ["child", "stop"]))
    assert run.turns[1].messages[0]["content"].isdigit()
    left = [each for each in psutil.Process().children(recursive=True) if is_sleeping(each)]
    assert psutil.wait_procs(left, 60)[1] == []
    assert not any(map(is_sleeping, psutil.Process().children(recursive=True)))


def is_sleeping(process: psutil.Process) -> bool:
    """Whether a process is what the environment started."""
    try:
        return process.cmdline() == ["sleep", "1000"]
    except psutil.NoSuchProcess:
        return False


def test_hosts_answer_only_whoever_has_the_token(drive: Drive) -> None:
    options = GymnasiumOptions(id="", **gymnasium_envs.COMMON)

    async def scenario() -> bytes:
        async with pool_of(KIND.spec(options)).borrow() as server:
            host, _, port = server.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b'guess\n{"method": "reset", "args": {}}\n')
            answer = await reader.read()
            writer.close()
            return answer

    assert drive(scenario()) == b""


def test_guessing_gives_hints_and_only_what_is_new(drive: Drive) -> None:
    run = drive(arena("GuessTheNumber-v0", ["[20]", "[5]", "[8]"], Task("number:1", metadata={"seed": 3})))
    assert read(run)[1:] == ["The target number is lower.", "The target number is higher."]
    assert "between 1 and 20" in read(run)[0]
    assert (run.score.reward, run.outcome) == (1.0, "finished")


def test_a_second_player_is_scripted(drive: Drive) -> None:
    args = {"players": 2, "opponent": "troubled_arena:first_move"}
    won = drive(arena("TicTacToe-v0", ["[8]", "[4]", "[5]", "[3]"], **args))  # 0, 1 and 2 are the opponent's
    assert won.score.reward == -1.0
    lost = drive(arena("TicTacToe-v0", ["[2]", "[4]", "[6]"], **args))
    assert lost.score.reward == 1.0
    assert "[Player 1] [0]" in read(lost)[1]
    second = drive(arena("TicTacToe-v0", ["[4]", "[2]", "[6]"], **args, seat=1))
    assert second.score.reward == 1.0
    assert "[Player 0] [0]" in read(second)[0]


def test_a_random_player_depends_on_the_seed(drive: Drive) -> None:
    moves = [f"[{number}]" for number in range(9)]
    args = {"players": 2, "max_moves": 2}
    first, again = (drive(arena("TicTacToe-v0", moves[:2], **args)) for _ in range(2))
    assert read(first) == read(again)
    games = {read(drive(arena("TicTacToe-v0", ["[4]"], Task(f"t:{n}"), players=2, max_moves=1)))[0] for n in range(2)}
    assert len(games) == 1  # the policy moves first
    replies = [read(drive(arena("TicTacToe-v0", ["[4]", "[4]"], Task(f"t:{n}"), **args)))[1] for n in range(6)]
    assert len(set(replies)) > 1


@pytest.mark.parametrize(
    ("change", "words"),
    [({"name": "Tennis-v0"}, "no game Tennis-v0"), ({"players": 2}, "has to be 1"), ({"make": {"speed": 1}}, "speed")],
)
def test_games_that_cannot_be_made_end_the_run(drive: Drive, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        drive(arena(**{"name": "GuessTheNumber-v0", "answers": [], **change}))


def test_a_game_without_a_reward_is_a_fault(drive: Drive) -> None:
    with pytest.raises(Fault) as caught:
        drive(arena("troubled_arena:Troubled-v0", ["no reward"]))
    assert caught.value.kind == "textarena_error"
