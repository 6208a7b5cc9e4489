"""What many groups in a row that taught nothing say about a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from episodes import make_group
from forge.errors import RolloutError
from forge.rollout.signal import NoSignalGroup, NoSignalTally
from forge.types import Group


def failing(number: int, messages: Sequence[str | None]) -> Group:
    """A group of rewards of 0; a message for each completion whose reward failed."""
    group = make_group(number, (0.0,) * len(messages))
    pairs = zip(group.episodes, messages, strict=True)
    return replace(
        group,
        episodes=tuple(
            episode if why is None else replace(episode, score=replace(episode.score, failures={"mine": why}))
            for episode, why in pairs
        ),
    )


def error_of(tally: NoSignalTally) -> RolloutError:
    return tally.error("nothing", path="rollout.max_no_signal_groups", rule="fewer")


def test_the_failure_that_is_named_is_the_most_frequent_one_whatever_its_texts() -> None:
    tally = NoSignalTally()
    tally.add(NoSignalGroup(0, "no_signal", "failed", failing(0, ["TypeError: no", "KeyError: 1"])))
    tally.add(NoSignalGroup(1, "no_signal", "failed", failing(1, ["KeyError: 2", "KeyError: 3"])))
    assert tally.summary() == (
        "a reward failed (2 groups); rewards failed on 4 of 4 completions, most often (3 times) 'mine': KeyError: 1"
    )


def test_rewards_that_fail_on_most_completions_are_what_is_to_be_corrected() -> None:
    """Each group has one completion that earned an honest 0, so that no group failed as a whole."""
    tally = NoSignalTally()
    tally.add(NoSignalGroup(0, "no_signal", "all_zero", failing(0, ["KeyError: 1", "KeyError: 2", None])))
    assert str(error_of(tally).repair).startswith("correct the reward")
    few = NoSignalTally()
    few.add(NoSignalGroup(0, "no_signal", "all_zero", failing(0, ["KeyError: 1", None, None])))
    assert str(error_of(few).repair).startswith("the task is too hard")
    assert "rewards failed on 1 of 3 completions" in str(error_of(few).value)


def test_prompts_that_nobody_can_answer_are_not_looked_for_in_rollouts() -> None:
    tally = NoSignalTally()
    tally.add(NoSignalGroup(0, "refused", "refused"))
    assert error_of(tally).value == "1 group: no generator can answer the prompt (1 group)"
    assert str(error_of(tally).repair).startswith("shorten the prompts")


def test_signal_begins_the_count_again_and_what_was_recorded_stays_readable() -> None:
    tally = NoSignalTally()
    tally.add(NoSignalGroup(0, "no_signal", "all_zero", failing(0, ["KeyError: 1"])), recorded_in=Path("there.jsonl"))
    tally.restart()
    assert (tally.num_groups, tally.summary()) == (0, "")
    tally.add(NoSignalGroup(1, "no_signal", "all_equal", make_group(1)))
    assert str(error_of(tally).repair).startswith("look at there.jsonl; the task is solved")
