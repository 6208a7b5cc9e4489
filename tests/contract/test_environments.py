"""What every environment promises, our own and those of other projects: `external_envs.integrations`.

Episodes run as in training, by `EpisodeWorker` and `EpisodeSource`; only the generators are scripted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from external_envs import TROUBLES, Integration, Script, Trouble, Unavailable, integrations
from forge.config import AlgorithmConfig, EpisodeConfig
from forge.config.episodes import EpisodeLimits
from forge.envs.check_leaks import OpenResources, pending_since, resources_after
from forge.envs.episode import EpisodeProgram
from forge.envs.limits import Fault
from forge.envs.trace import path_to, rows_of
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.rollout.episode_source import EpisodeSource
from forge.rollout.episode_worker import EpisodeOptions, EpisodeWorker
from forge.rollout.references import References
from forge.types import Completion, Episode, Task, VersionSpan
from leftovers import lasting_children, running_children

END = "<|im_end|>"
LIMIT_S = 600
GRACE_S = 60.0
"""How long what an episode used may take to go."""
CONTEXT = 8192


@dataclass
class ScriptedGenerators:
    """The policy service of one episode. Answers are tokenised letter by letter, as no tokenizer would: whoever
    tokenises them again gets other ids. `hold` keeps the answer with this number back for ever."""

    codec: ChatTokenizer
    answers: Sequence[str] | Callable[[int], Sequence[int]]
    hold: int | None = None
    is_holding: asyncio.Event = field(default_factory=asyncio.Event)
    exchanges: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[str]:
        yield "session"

    @property
    def generate(self) -> ScriptedGenerators:
        return self

    def options(self, **options: Any) -> ScriptedGenerators:
        return self

    async def route(self, *, token_ids: list[int], sampling: Mapping[str, Any]) -> list[Completion]:
        number = len(self.exchanges)
        if number == self.hold:
            self.is_holding.set()
            await asyncio.Event().wait()
        ids = self._answer(number)[: sampling["max_tokens"]]
        self.exchanges.append((tuple(token_ids), ids))
        self.seeds.append(sampling["seed"])
        is_whole = bool(ids) and ids[-1] in self.codec.stop_token_ids
        return [
            Completion(
                prompt_ids=tuple(token_ids),
                token_ids=ids,
                logprobs=(-0.5,) * len(ids),
                full_logprobs=None,
                text=self.codec.decode(ids, skip_special=True),
                finish_reason="stop" if is_whole else "length",
                versions=(VersionSpan(3, 0, len(ids)),),
            )
        ]

    def _answer(self, number: int) -> tuple[int, ...]:
        if callable(self.answers):
            return tuple(self.answers(number))
        assert number < len(self.answers), f"the episode asked for a turn {number + 1}, the script has {self.answers}"
        letters = [token for letter in self.answers[number] for token in self.codec.encode_rendered(letter)]
        return (*letters, *self.codec.encode_rendered(END))


@dataclass
class Bench:
    """One integration, open, on a loop that all its tests share: its servers start once."""

    integration: Integration
    program: EpisodeProgram
    codec: ChatTokenizer
    runner: asyncio.Runner

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            async with asyncio.timeout(LIMIT_S):
                return await body

        return self.runner.run(limited())

    def generators(self, script: Script | Sequence[str], **changes: Any) -> ScriptedGenerators:
        answers = script.answers if isinstance(script, Script) else script
        return ScriptedGenerators(self.codec, answers, **changes)

    def worker(self, script: Script, policy: ScriptedGenerators, **limits: Any) -> EpisodeWorker:
        bounds = EpisodeLimits(**{**script.limits, **limits})
        sampling = {"temperature": 1.0, "max_tokens": 512}
        options = EpisodeOptions(
            program=self.program.with_args(script.args) if script.args else self.program,
            limits=bounds,
            evaluation_limits=bounds,
            sampling=sampling,
            evaluation_sampling=sampling,
            max_seq_len=CONTEXT,
            tool_format="hermes",
            run_seed=5,
        )
        return EpisodeWorker(options, self.codec, cast(Any, policy))

    def task(self, script: Script) -> Task:
        task = self.integration.task
        return task if script.metadata is None else replace(task, metadata=script.metadata)

    async def play(self, script: Script, policy: ScriptedGenerators | None = None, **limits: Any) -> Episode:
        made: Any = self.worker(script, policy or self.generators(script), **limits)
        found: Episode = await made.run(self.task(script), 7, 1)
        return found

    def trouble(self, kind: Trouble) -> Script:
        script = self.integration.troubles[kind]
        if isinstance(script, str):
            pytest.skip(f"{self.integration.name}: {script}")
        return script


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="module", params=integrations(), ids=lambda each: each.name)
def bench(request: pytest.FixtureRequest, codec: ChatTokenizer) -> Iterator[Bench]:
    integration: Integration = request.param
    children = running_children()
    with asyncio.Runner() as runner:
        try:
            program = runner.run(integration.open())
        except Unavailable as reason:
            pytest.skip(f"{integration.name}: {reason}")
        yield Bench(integration, program, codec, runner)
        runner.run(integration.close())
    assert lasting_children(children) == []


def test_the_reward_is_what_the_answers_earn(bench: Bench) -> None:
    for script in (bench.integration.good, bench.integration.bad):
        assert script.reward is not None
        episode = bench.run(bench.play(script))
        assert episode.score.reward == pytest.approx(script.reward)
        assert episode.outcome == "finished"
        assert len(episode.turns) == len(script.answers) > 1
    assert bench.integration.good.reward != bench.integration.bad.reward


def test_rows_are_exactly_what_the_engine_received_and_sampled(bench: Bench) -> None:
    script = bench.integration.good
    policy = bench.generators(script)
    episode = bench.run(bench.play(script, policy))
    found = [
        (
            tuple(
                token for each in path_to(episode.turns, turn.parent) for token in (*each.context_ids, *each.token_ids)
            )
            + turn.context_ids,
            turn.token_ids,
        )
        for turn in episode.turns
    ]
    assert Counter(found) == Counter(policy.exchanges)
    sampled = [
        row.token_ids[start:end]
        for row in rows_of(episode.turns)
        for start, end, _, counts in row.sampled_spans()
        if counts
    ]
    assert sorted(sampled) == sorted(ids for _, ids in policy.exchanges)
    assert any(ids != tuple(bench.codec.encode_rendered(bench.codec.decode(ids))) for _, ids in policy.exchanges)


def test_the_same_task_and_seeds_give_the_same_episode(bench: Bench) -> None:
    script = bench.integration.good
    policies = [bench.generators(script) for _ in range(2)]
    first, second = (bench.run(bench.play(script, policy)) for policy in policies)
    assert first.turns == second.turns
    assert (first.score, first.turn_rewards) == (second.score, second.turn_rewards)
    assert policies[0].seeds == policies[1].seeds
    assert len(set(policies[0].seeds)) == len(script.answers)


def test_limits_end_the_episode_and_what_it_earned_counts(bench: Bench) -> None:
    script = bench.integration.good
    one_turn = bench.run(bench.play(script, max_turns=1))
    assert (one_turn.outcome, len(one_turn.turns)) == ("turn_limit", 1)
    few_tokens = bench.run(bench.play(script, max_tokens=2))
    assert few_tokens.outcome in ("token_limit", "finished")  # two letters may already lose a game
    assert few_tokens.num_tokens <= 2


def test_nonsense_of_the_policy_is_never_a_fault(bench: Bench) -> None:
    rng = random.Random(11)

    def nonsense(number: int) -> list[int]:
        return [*rng.choices(range(bench.codec.vocab_size), k=12), *bench.codec.encode_rendered(END)]

    script = bench.integration.good
    for _ in range(3):
        episode = bench.run(bench.play(script, ScriptedGenerators(bench.codec, nonsense), max_turns=3))
        assert episode.outcome in ("finished", "turn_limit")
        assert 1 <= len(episode.turns) <= 3


@pytest.mark.parametrize("kind", TROUBLES)
def test_trouble_ends_its_own_episode_only(bench: Bench, kind: Trouble) -> None:
    broken, good = bench.trouble(kind), bench.integration.good

    async def side_by_side() -> tuple[Episode | BaseException, Episode | BaseException]:
        found = await asyncio.gather(bench.play(broken), bench.play(good), return_exceptions=True)
        return found[0], found[1]

    ended, neighbour = bench.run(side_by_side())
    if broken.reward is None:
        assert isinstance(ended, Fault), ended
        assert ended.kind == broken.fault
    else:
        assert isinstance(ended, Episode), ended
        assert ended.score.reward == pytest.approx(broken.reward)
    assert isinstance(neighbour, Episode), neighbour
    assert neighbour.score.reward == pytest.approx(good.reward)
    after = bench.run(bench.play(good))
    assert after.score.reward == pytest.approx(good.reward)


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_fault_is_never_scored_and_its_task_runs_again(bench: Bench, kind: Trouble) -> None:
    broken, good = bench.trouble(kind), bench.integration.good
    if broken.fault is None:
        pytest.skip(f"{bench.integration.name}: {kind} is not a fault here")
    attempts = [(broken, bench.generators(broken)), (good, bench.generators(good))]
    made = iter(attempts)

    async def attempt(task: Task, group: int, member: int, **options: Any) -> Episode:
        script, policy = next(made)
        worker: Any = bench.worker(script, policy)
        episode: Episode = await worker.run(bench.task(script), group, member, **options)
        return episode

    class Tasks:
        def at(self, number: int) -> tuple[int, Task]:
            return 0, bench.integration.task

    source = EpisodeSource(
        Tasks(),
        run=attempt,
        compare=None,
        references=References(None, algorithm=AlgorithmConfig(), temperature=1.0),
        config=EpisodeConfig(kind="external_envs:COUNTING", max_retries=1),
        group_size=1,
    )
    group = bench.run(source.roll_out(4))
    assert group.rewards == (pytest.approx(good.reward),)
    assert source.take_metrics() == {f"episode/faults/{broken.fault}": 1.0, "episode/num_faults": 1.0}
    seeds = [policy.seeds for _, policy in attempts]
    shared = min(map(len, seeds))
    assert shared > 0
    assert seeds[0][:shared] == seeds[1][:shared]


def test_a_cancelled_episode_closes_its_environment(bench: Bench) -> None:
    script = bench.integration.good
    bench.run(bench.play(script))  # whatever episodes share is there

    async def cancel() -> list[tuple[str, str]]:
        before = OpenResources.now()
        tasks = asyncio.all_tasks()
        policy = bench.generators(script, hold=1)
        playing = asyncio.create_task(bench.play(script, policy))
        await policy.is_holding.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert await pending_since(tasks, grace_s=GRACE_S) == []
        return (await resources_after(before, grace_s=GRACE_S)).since(before)

    assert bench.run(cancel()) == []


def test_episodes_leave_nothing_behind(bench: Bench) -> None:
    script = bench.integration.good

    async def many() -> list[tuple[str, str]]:
        await asyncio.gather(*(bench.play(script) for _ in range(4)))
        before = OpenResources.now()
        tasks = asyncio.all_tasks()
        episodes = await asyncio.gather(*(bench.play(script) for _ in range(8)))
        assert [episode.score.reward for episode in episodes] == [pytest.approx(script.reward)] * 8
        assert await pending_since(tasks, grace_s=GRACE_S) == []
        return (await resources_after(before, grace_s=GRACE_S)).since(before)

    assert bench.run(many()) == []
