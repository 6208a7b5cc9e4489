"""A part of the list of runs, as it is sent to a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.ui.run_summary import RunSummary
from forge.ui.strict_json import to_json


@dataclass(frozen=True, slots=True)
class ListPart:
    """Runs whose line in the list has changed after a version of it, and those that are gone, oldest change first.

    Attributes:
        version: that of the list with these changes.
        root: the folder of runs.
        is_complete: whether all runs that were found have a summary, and nothing follows.
        is_cut: whether there are more runs than the list may have.
        has_more: whether there are later changes.
    """

    version: int
    root: str
    is_complete: bool
    is_cut: bool
    runs: Sequence[RunSummary] = ()
    gone: Sequence[str] = ()
    has_more: bool = False

    def text(self) -> str:
        """Return it as JSON. For many runs that takes long: call it in a thread, which lets others go ahead."""
        facts = {
            "version": self.version,
            "root": self.root,
            "isComplete": self.is_complete,
            "isCut": self.is_cut,
            "gone": self.gone,
        }
        runs = ",".join([to_json(run.plain()) for run in self.runs])
        return f'{to_json(facts)[:-1]},"runs":[{runs}]}}'
