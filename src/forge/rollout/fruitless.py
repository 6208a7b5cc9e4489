"""Groups that teach nothing: what is known of each, and what many of them in a row say about a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from forge.errors import RolloutError
from forge.rollout.signal import REASONS, Reason
from forge.types import Group

GivenUp = Literal["no_signal", "failed", "refused"]
"""Why a group is dropped: no signal, a failed reward, a prompt that no generator can answer."""

_TRY: Final = "give a completion to `forge rewards try`"
_ADVICE: Final[dict[Reason, str]] = {
    "all_zero": "the task is too hard, completions are cut off before the answer, or the reward never matches what the "
    f"policy writes: {_TRY}, try easier prompts or a longer generator.sampling.max_tokens",
    "all_equal": "the task is solved, or the reward does not tell completions apart: try harder prompts, a larger "
    "rollout.group_size or a higher generator.sampling.temperature",
    "equal_before_shaping": "only length terms tell completions apart: try other prompts, or "
    "rollout.no_signal=drop, which learns from length terms, too",
    "cut_off": "raise generator.sampling.max_tokens, or set rollout.mask_truncated=false",
    "failed": f"correct the reward, and {_TRY} before the next run",
    "refused": "shorten the prompts, or raise training.max_seq_len; the warnings before this name each prompt",
}


@dataclass(frozen=True, slots=True)
class Fruitless:
    """A group that teaches nothing.

    Attributes:
        number: the group's.
        outcome: what the ledger says if it is dropped.
        reason: why it teaches nothing.
        group: what was sampled; None where nothing was.
        is_kept: whether it is trained on all the same (`rollout.no_signal: keep`).
    """

    number: int
    outcome: GivenUp
    reason: Reason
    group: Group | None = None
    is_kept: bool = False


class FruitlessTally:
    """Counts the groups in a row that taught nothing, and says why they did not."""

    def __init__(self) -> None:
        self.recorded_in: Path | None = None
        """Where some of the groups can be read."""
        self.restart()

    def restart(self) -> None:
        """Begin again: a group had signal."""
        self.num_groups = 0
        self._reasons: Counter[Reason] = Counter()
        self._num_completions = self._num_failed = 0
        self._failures: Counter[tuple[str, str]] = Counter()
        self._messages: dict[tuple[str, str], str] = {}

    def add(self, fruitless: Fruitless, *, recorded_in: Path | None = None) -> None:
        """Count a group. `recorded_in` is the file that it was written to, if it was."""
        self.num_groups += 1
        self._reasons[fruitless.reason] += 1
        self.recorded_in = recorded_in or self.recorded_in
        for episode in fruitless.group.episodes if fruitless.group is not None else ():
            self._num_completions += 1
            self._num_failed += bool(episode.score.failures)
            for name, message in episode.score.failures.items():
                kind = (name, message.partition(":")[0])  # an exception's type: messages may differ in every call
                self._failures[kind] += 1
                self._messages.setdefault(kind, message)

    def summary(self) -> str:
        """How many groups for which reason, and which failure of a reward was most frequent."""
        text = ", ".join(f"{REASONS[reason]} ({_groups(count)})" for reason, count in self._reasons.most_common())
        if self._failures:
            (kind, count), *_ = self._failures.most_common(1)
            text += (
                f"; rewards failed on {self._num_failed} of {self._num_completions} completions, "
                f"most often ({count} times) {kind[0]!r}: {self._messages[kind]}"
            )
        return text

    def error(self, message: str, *, path: str, rule: str) -> RolloutError:
        """An error that says what was counted, and what helps against the most frequent reason."""
        ((reason, _),) = self._reasons.most_common(1)
        if self._num_failed * 2 > self._num_completions:
            reason = "failed"
        look = "" if self.recorded_in is None else f"look at {self.recorded_in}; "
        return RolloutError(
            message,
            path=path,
            value=f"{_groups(self.num_groups)}: {self.summary()}",
            rule=rule,
            repair=look + _ADVICE[reason],
        )


def _groups(count: int) -> str:
    return f"{count} group" if count == 1 else f"{count} groups"
