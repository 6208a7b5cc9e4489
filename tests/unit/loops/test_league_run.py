"""The league of a run: members in the store and their files, checkpoints, and what planning refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from forge.config import LeagueConfig
from forge.errors import CheckpointError, ConfigError
from forge.loops.bound_versions import check_members, members_dir
from forge.loops.league import RunLeague, make_league
from forge.loops.planning import plan_run
from forge.memory import plan_memory
from forge.rollout.league import League
from forge.store import PinnedVersions, Weights
from forge.store.version_file import version_path
from forge.trainer.checkpoint_folder import CheckpointInfo, checkpoint_name, read_checkpoint, write_record
from grpo_runs import config
from store_scenarios import alone


async def publish(*numbers: int, salt: float = 0.0) -> None:
    weights = Weights("policy", rank=0, world_size=1)
    for number in numbers:
        await weights.publish({"one": torch.tensor([number + salt])}, version=number)


unloaded: list[int] = []


async def unload(version: int) -> None:
    unloaded.append(version)


def opened(folder: Path, **keys: Any) -> tuple[RunLeague, League, PinnedVersions]:
    league = League(LeagueConfig(**keys), ("row", "column"), seed=0, max_versions=keys.get("max_members", 8))
    pins = PinnedVersions("policy", folder=folder / "pinned")
    run = RunLeague(league, pins, unload=unload, folder=folder, checkpoints=folder / "checkpoints")
    return run, league, pins


def checkpoint(folder: Path, step: int, state: dict[str, Any]) -> dict[str, Any]:
    """Write what is read of a checkpoint."""
    place = folder / "checkpoints" / checkpoint_name(step)
    place.mkdir(parents=True)
    write_record(CheckpointInfo(place, step, step, "", None, 1, "", extra={"caller": state}), folder=place)
    found: dict[str, Any] = read_checkpoint(place).extra["caller"]
    return found


def files(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("version-")) for path in (folder / "pinned").iterdir())


def test_members_are_pinned_and_files_stay_as_long_as_a_checkpoint_needs_them(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def first() -> None:
        unloaded.clear()
        run, league, pins = opened(tmp_path, add_every=1, max_members=2, evict="oldest")
        for step in range(4):
            await publish(step)
            await run.grow(step)
            if step == 1:
                kept.update(checkpoint(tmp_path, step, run.state([])))
            assert pins.versions == league.versions
        assert (league.versions, unloaded) == ((2, 3), [0, 1])
        assert files(tmp_path) == [0, 1, 2, 3]  # the checkpoint has 0 and 1

    async def second() -> None:
        run, league, pins = opened(tmp_path, add_every=1, max_members=2, evict="oldest")
        await run.restore(kept)
        assert pins.versions == league.versions == (0, 1)
        await publish(1)
        await run.grow(1)  # it was made before the checkpoint
        assert league.versions == (0, 1)
        (tmp_path / "checkpoints" / "step-00000001" / "checkpoint.json").unlink()
        await publish(2)
        await run.grow(2)
        assert (league.versions, files(tmp_path)) == ((1, 2), [1, 2])

    alone(first)
    alone(second)


def test_files_that_a_checkpoint_on_its_way_needs_stay(tmp_path: Path) -> None:
    async def scenario() -> None:
        run, league, _ = opened(tmp_path, add_every=1, max_members=1)
        for step in range(4):
            await publish(step)
            await run.grow(step)
            if step == 1:
                run.state([])  # it is being written beside training
        assert (league.versions, files(tmp_path)) == ((3,), [1, 3])

    alone(scenario)


def test_members_that_were_replaced_are_refused(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def first() -> None:
        run, _, _ = opened(tmp_path)
        await publish(0)
        await run.grow(0)
        kept.update(run.state([]))

    async def other() -> None:
        run, _, _ = opened(tmp_path)
        await publish(0, salt=0.5)
        await run.grow(0)

    async def resumed() -> None:
        run, _, _ = opened(tmp_path)
        with pytest.raises(CheckpointError, match=r"not what it was[\s\S]*version 0"):
            await run.restore(kept)

    for scenario in (first, other, resumed):
        alone(scenario)


def test_members_whose_files_are_elsewhere_are_named(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    async def first() -> None:
        run, _, _ = opened(tmp_path / "first")
        await publish(0)
        await run.grow(0)
        kept.update(run.state([]))

    async def second() -> None:
        run, _, _ = opened(tmp_path / "second")
        with pytest.raises(CheckpointError, match=r"version-00000000[\s\S]*copy [^ ]*second/pinned from the run"):
            await run.restore(kept)

    alone(first)
    alone(second)


def test_a_run_whose_members_have_no_files_is_refused_before_it_starts(tmp_path: Path) -> None:
    chosen, state = config(tmp_path / "run", *GAME, "episode.league={}"), {"league": {"digests": {"0": "a", "2": "b"}}}
    folder = members_dir(chosen)
    folder.mkdir(parents=True)
    version_path(folder, 0).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"version-00000002[\s\S]*copy [^ ]*pinned from the run"):
        check_members(chosen, state, most=2)
    check_members(chosen, state, most=1)  # one of them is not needed
    check_members(config(tmp_path / "other", *GAME), state, most=0)
    version_path(folder, 2).write_bytes(b"")
    check_members(chosen, state, most=2)


def test_a_run_without_a_league_does_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        run = RunLeague(None, None, unload=unload, folder=tmp_path, checkpoints=tmp_path)
        await run.grow(0)
        await run.restore({"league": {}})
        run.write(1)
        assert run.state([1]) == {}
        assert list(tmp_path.iterdir()) == []

    alone(scenario)


GAME = ("rewards.functions=[]", "episode.kind=own_games:pennies")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["episode.league={agents: [row, judge]}"], r"a league needs agents[\s\S]*names among row, column"),
        (["episode.league={learner: judge}"], r"a league needs agents[\s\S]*names among row, column"),
        (
            ["episode.league={}", "episode.kind=own_episodes:dialogue"],
            r"a league needs agents[\s\S]*declares no agents[\s\S]*declare at least two",
        ),
        (["episode.league={}", "episode.agents={row: {learns: false}}"], r"the league decides[\s\S]*agents\.row"),
        (["episode.league={}", "episode.agents={row: {advantage: zero_sum}}"], "the league decides"),
        (["episode.league={}", "episode.agents={row: {endpoint: {url: 'http://x/v1'}}}"], "the league decides"),
        (
            ["episode.league={checkpoints: [nowhere]}"],
            r"this member cannot be loaded[\s\S]*episode.league.checkpoints.0",
        ),
        (["episode.league={}", "generator.engine=vllm"], r"cannot serve earlier versions[\s\S]*generator.engine"),
        (["episode.league={max_gb: 1.0e-6}"], r"no room for a version[\s\S]*episode.league.max_gb[\s\S]*at least"),
    ],
)
def test_what_planning_refuses(overrides: Sequence[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(config(tmp_path / "refused", *GAME, *overrides))


def test_agents_outside_the_league_are_what_their_section_says(tmp_path: Path) -> None:
    agents = "episode.agents={row: {limits: {max_turns: 4}, advantage: baseline}}"
    plan = plan_run(config(tmp_path / "fine", *GAME, agents, "episode.league={learner: row}"))
    assert plan.config.episode.league is not None


def test_versions_of_an_adapter_are_as_large_as_the_adapter(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path / "adapter", *GAME, "episode.league={}", "placement=shared", "adapter={rank: 4}"))
    league = make_league(plan)
    assert league is not None
    assert plan.run.adapter_parameters is not None
    assert league.version_bytes == plan.run.published_item * plan.run.adapter_parameters


def test_the_plan_has_the_bound_of_the_league(tmp_path: Path) -> None:
    few, many = (
        plan_run(config(tmp_path / "planned", *GAME, f"episode.league={{max_members: {count}}}")).run
        for count in (3, 6)
    )
    assert (few.num_members, many.num_members) == (3, 6)
    parts = {part.name: part for part in plan_memory(many).host.peak.parts}
    size = many.published_item * many.sizes.total
    assert (parts["league"].num_bytes, parts["league"].owner) == (6 * size, "store")
    tight = config(tmp_path / "tight", *GAME, f"episode.league={{max_gb: {2.5 * size / 1e9}}}")
    assert plan_run(tight).run.num_members == 2
