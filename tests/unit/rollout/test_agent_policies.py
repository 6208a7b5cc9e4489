"""What answers for agents in a worker: endpoints, generators of their own, the live policy; journals; group rewards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge
from answering_endpoint import answering
from forge import Agent, Task
from forge.config import AgentConfig, EpisodeConfig
from forge.config.agents import AgentLimits
from forge.config.episodes import EpisodeLimits
from forge.envs.character_codec import CharacterCodec
from forge.errors import RewardError
from forge.rollout.agent_credit import AgentCredit
from forge.rollout.agent_policies import AgentGenerators, AgentOptions, Seat
from forge.rollout.endpoint_policy import EndpointAddress
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.rollout.references import References
from forge.types import AgentResult, Completion, Episode, Group, Score, VersionSpan
from local_services import LocalService

TASK = Task("t", ({"role": "user", "content": "Hi"},))


class Answers:
    """A generator in this process that says one thing."""

    def __init__(self, text: str, *, version: int) -> None:
        self.text, self.version, self.codec, self.num_asked = text, version, CharacterCodec(), 0

    async def generate(self, *, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> list[Completion]:
        self.num_asked += 1
        ids = self.codec.encode_answer(self.text, max_tokens=sampling["max_tokens"])
        spans = (VersionSpan(self.version, 0, len(ids)),)
        return [Completion(tuple(token_ids), ids, (-1.0,) * len(ids), None, self.text, "stop", versions=spans)]


@forge.episode(agents=["a", "b"], deterministic=True)
async def talk(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
    first = await a.generate(task.messages)
    second = await b.generate([{"role": "user", "name": "a", "content": first.text}])
    await a.generate([{"role": "user", "name": "b", "content": second.text}])
    return {"a": 1.0}


def worker(live: Answers, b: AgentOptions, own: Answers | None = None, **changes: Any) -> EpisodeWorker:
    fields: dict[str, Any] = {
        "program": talk, "limits": EpisodeLimits(), "evaluation_limits": EpisodeLimits(),
        "sampling": {"max_tokens": 16}, "evaluation_sampling": {"max_tokens": 16}, "max_seq_len": 4096,
        "tool_format": "hermes", "run_seed": 0, "agents": {"a": AgentOptions(), "b": b},
    }  # fmt: skip
    service: Any = LocalService([live])
    generators = {}
    if own is not None:
        generators["b"] = AgentGenerators(LocalService([own]), own.codec, 512, "hermes")  # type: ignore[arg-type]
    return EpisodeWorker(EpisodeOptions(**{**fields, **changes}), live.codec, service, generators)


def test_an_agent_has_generators_of_its_own(tmp_path: Path) -> None:
    """Its weight versions are nobody's business: they do not make an episode stale, nor a journal."""
    live, own = Answers("live", version=7), Answers("other", version=0)
    options = AgentOptions(learns=False, label="model other")
    made = worker(live, options, own, journal_dir=str(tmp_path))
    episode = asyncio.run(made.run(TASK, 0, 0, oldest_version=7))
    assert [(turn.agent, turn.text, turn.is_trained) for turn in episode.turns] == [
        ("a", "live", True),
        ("a", "live", True),
        ("b", "other", False),
    ]
    assert (episode.version, live.num_asked, own.num_asked) == (7, 2, 1)
    assert episode.turns[2].token_ids == ()
    assert episode.agents["b"] == AgentResult(None, learns=False, policy="model other")
    keys = [json.loads(line)["key"] for line in (tmp_path / "0-0.jsonl").read_text().splitlines()]
    assert keys == [["a", 0], ["b", 0], ["a", 1]]
    again = asyncio.run(made.run(TASK, 0, 0, oldest_version=7))
    assert (again.turns, again.stats["num_replayed"]) == (episode.turns, 3.0)
    assert (live.num_asked, own.num_asked) == (2, 1)


def test_an_endpoint_answers_for_an_agent() -> None:
    live = Answers("live", version=1)
    with answering(lambda body: body["messages"][-1]["content"] + "!") as server:
        address = EndpointAddress(server.url, "m", None, 30.0)
        options = AgentOptions(learns=False, label="endpoint", limits=AgentLimits(max_turns=1), address=address)
        made = worker(live, options)

        async def both() -> Episode:
            try:
                return await made.run(TASK, 0, 0)
            finally:
                await made.close()

        episode = asyncio.run(both())
    assert [turn.text for turn in episode.turns] == ["live", "live", "live!"]
    assert episode.turns[1].messages[0]["content"] == "live!"
    assert (server.requests[0]["model"], server.requests[0]["max_tokens"]) == ("m", 16)
    assert episode.stats["num_sampled"] == 10.0  # of the live agent alone


def test_a_group_reward_gives_numbers_by_agent() -> None:
    results = {"a": AgentResult(Score(1.0)), "b": AgentResult(None, learns=False)}
    episodes = [Episode(TASK, (), Score(1.0), agents=results)] * 2
    live, b = Answers("live", version=0), AgentOptions(learns=False)
    found = asyncio.run(
        worker(live, b, group_reward=lambda task, given: [{"a": 2}, {}]).compare(TASK, episodes)  # type: ignore[arg-type]
    )
    assert found == [{"a": 2.0}, {}]
    for values in ([1.0, 2.0], [{"c": 1.0}, {}], [{"a": float("nan")}, {}]):
        reward: Any = lambda task, given, values=values: values  # noqa: E731
        with pytest.raises(RewardError):
            asyncio.run(worker(live, b, group_reward=reward).compare(TASK, episodes))


def test_a_source_adds_the_group_reward_to_each_agent() -> None:
    results = {"a": AgentResult(Score(1.0, {"right": 1.0})), "b": AgentResult(Score(0.5))}

    async def run(task: Task, group: int, member: int, **options: Any) -> Episode:
        return Episode(TASK, (), Score(1.0), member=member, agents=results)

    async def compare(task: Task, episodes: Sequence[Episode]) -> list[Any]:
        return [{"a": 0.25, "b": -0.25}, {"b": 1.0}]

    source = EpisodeSource(
        SimpleNamespace(at=lambda number: (0, TASK)),  # type: ignore[arg-type]
        run=run,
        compare=compare,
        references=References(None, algorithm=forge.config.AlgorithmConfig(), temperature=1.0),
        config=EpisodeConfig(),
        group_size=2,
    )
    group: Group = asyncio.run(source.roll_out(0))
    rewards = [
        {name: each.score.reward for name, each in found.agents.items() if each.score} for found in group.episodes
    ]
    assert rewards == [{"a": 1.25, "b": 0.25}, {"a": 1.0, "b": 1.5}]
    assert group.rewards == (1.25, 1.0)
    assert group.episodes[0].score.parts == {"a": 1.25, "a/right": 1.0, "a/group": 0.25, "b": 0.25, "b/group": -0.25}


def test_zero_sum_needs_a_reward_of_the_opponent() -> None:
    results = {"a": AgentResult(Score(1.0)), "b": AgentResult(None, learns=False)}
    group = Group(0, 0, (Episode(TASK, (), Score(1.0), agents=results),))
    credit = AgentCredit({"a": AgentConfig(advantage="zero_sum")})
    with pytest.raises(RewardError, match="b has no reward"):
        credit.assign([group], list)


# ---- Seats: what differs between episodes ----------------------------------------------------------------------------


@forge.episode(agents=["a", "b"])
async def talk_for_both(task: Task, a: Agent, b: Agent) -> Mapping[str, float]:
    return {**(await talk.function(task, a, b)), "b": 0.5}  # type: ignore[dict-item]


def test_a_seat_says_what_answers_and_who_learns_in_one_episode() -> None:
    live, own = Answers("live", version=7), Answers("other", version=0)
    made = worker(live, AgentOptions(limits=AgentLimits(max_turns=5)), own, program=talk_for_both)
    seats = {"a": Seat(False, "checkpoint x", generators="b"), "b": Seat(True, "live")}
    episode = asyncio.run(made.run(TASK, 0, 0, seats=seats))
    assert [(turn.agent, turn.text, turn.is_trained) for turn in episode.turns] == [
        ("a", "other", False),
        ("a", "other", False),
        ("b", "live", True),
    ]
    assert {name: (result.learns, result.policy) for name, result in episode.agents.items()} == {
        "a": (False, "checkpoint x"),
        "b": (True, "live"),
    }
    assert (episode.version, len(episode.turns[0]), len(episode.turns[2])) == (7, 0, 5)


def test_a_live_opponent_has_tokens_and_versions_and_does_not_learn() -> None:
    live = Answers("live", version=3)
    seats = {"a": Seat(True, "live"), "b": Seat(False, "live")}
    episode = asyncio.run(worker(live, AgentOptions()).run(TASK, 0, 0, seats=seats))
    assert [turn.is_trained for turn in episode.turns] == [True, True, False]
    assert [len(turn) for turn in episode.turns] == [5, 5, 5]


def test_a_journal_is_replayed_only_where_the_same_opponent_answers(tmp_path: Path) -> None:
    live, own = Answers("live", version=7), Answers("other", version=0)

    def played(label: str) -> Episode:
        made = worker(live, AgentOptions(), own, journal_dir=str(tmp_path))
        seats = {"a": Seat(True, "live"), "b": Seat(False, label, generators="b")}
        return asyncio.run(made.run(TASK, 0, 0, seats=seats))

    assert played("checkpoint x").stats["num_replayed"] == 0
    again = played("checkpoint x")
    assert (again.stats["num_replayed"], live.num_asked, own.num_asked) == (3, 2, 1)
    other = played("checkpoint y")
    assert (other.stats["num_replayed"], other.stats["num_replay_mismatches"]) == (0, 1)
    assert (live.num_asked, own.num_asked) == (4, 2)
