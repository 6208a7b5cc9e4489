"""The tasks of an evaluation: which prompts, in which order, and a digest that says whether two had the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from forge.config import EvalConfig, EvaluationConfig
from forge.data.prompts import PromptDataset, PromptOrder, open_prompts
from forge.errors import ConfigError
from forge.types import Task


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """The tasks of an evaluation.

    Attributes:
        dataset: the prompts that they are taken from.
        indices: their places in the dataset, in the order in which they are run.
        digest: of what is asked, the answers and the metadata, in the order of the dataset. Where the files lie, and
            what is put around the prompts, does not count.
    """

    dataset: PromptDataset
    indices: tuple[int, ...]
    digest: str

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Task:
        """Return a task by its place in the dataset."""
        return self.dataset.read(index)


def open_tasks(config: EvalConfig) -> EvalTasks:
    """Open the tasks that a configuration names."""
    if not config.prompts.sources:
        raise ConfigError(
            "there are no tasks to evaluate on",
            path="prompts.sources",
            value=(),
            rule="at least one source",
            repair="give --data FILE, --task NAME, --run RUN, or --config FILE with prompts.sources",
        )
    section, seed = config.eval, config.run.seed
    held = EvaluationConfig(fraction=section.heldout_fraction, max_prompts=section.num_tasks)
    split = open_prompts(config.prompts, evaluation=held, seed=seed, for_episodes=config.episode.kind is not None)
    dataset = split.train if split.heldout is None else split.heldout
    order = PromptOrder(dataset, seed=seed, shuffle=config.prompts.shuffle)
    count = min(len(dataset), section.num_tasks or len(dataset))
    indices = tuple(order.place(number)[1] for number in range(count))
    return EvalTasks(dataset, indices, _digest(dataset, indices))


def _digest(dataset: PromptDataset, indices: tuple[int, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for index in sorted(indices):
        task = dataset.read_bare(index)
        asked = task.text if task.text is not None else [dict(message) for message in task.messages]
        text = json.dumps([asked, task.answer, dict(task.metadata)], sort_keys=True, default=str)
        digest.update(hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=16).digest())
    return digest.hexdigest()
