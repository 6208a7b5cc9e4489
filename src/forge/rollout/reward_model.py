"""`RewardModel`: a classifier with one label, behind a service."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge.config.rewards import RewardModelConfig
from forge.errors import ConfigError, DataError, ModelError
from forge.runtime.endpoints import Batch, endpoint
from forge.service.actor import ForgeActor

if TYPE_CHECKING:
    from forge.models.tokenizer import ChatTokenizer

Conversation = str | Sequence[Mapping[str, Any]]
"""What is scored: text as it is, or messages, the last of which is the completion."""

_PATH = "rewards.reward_model.path"


class Scorer(Protocol):
    """A loaded reward model."""

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of tokens, read at its last one."""


MakeScorer = Callable[["RewardFolder"], Scorer]
"""Loads a reward model, in the process that runs it."""


@dataclass(frozen=True, slots=True)
class RewardFolder:
    """A reward model on disk that was checked.

    Attributes:
        config: the section that names it.
        tokenizer: its tokenizer, with the chat template that conversations are rendered with.
        max_seq_len: tokens of the longest conversation.
        microbatch_tokens: tokens of a forward pass, for engines that do not pad.
    """

    config: RewardModelConfig
    tokenizer: ChatTokenizer
    max_seq_len: int
    microbatch_tokens: int


def read_folder(config: RewardModelConfig) -> RewardFolder:
    """Check the folder of a reward model, without its weights. Raises `ModelError` or `ConfigError`.

    Refused are anything but a classifier with one label, a tokenizer that does not fit the model, and conversations
    longer than the model reads.
    """
    from forge.models.tokenizer import ChatTokenizer

    folder = Path(config.path)
    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(type(facts).__name__)
    except (OSError, ValueError):
        raise _unfit(folder, "a folder with config.json, weights and a tokenizer") from None
    names, labels = facts.get("architectures") or (), facts.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else facts.get("num_labels", 2)
    if num_labels != 1 or not any(str(name).endswith("ForSequenceClassification") for name in names):
        found = f"{', '.join(names) or 'no architecture'}, {num_labels} labels"
        raise _unfit(found, "a model for sequence classification with one label")
    try:
        tokenizer = ChatTokenizer.load(folder, chat_template=config.chat_template)
    except ModelError as error:
        error.path = _PATH if config.chat_template is None else "rewards.reward_model.chat_template"
        raise
    rows, limit = facts.get("vocab_size"), facts.get("max_position_embeddings")
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise ModelError(
            "the reward model's tokenizer is not the one that it was trained with",
            path=_PATH,
            value=config.path,
            rule=f"the model has {rows} tokens, and the tokenizer in its folder has {tokenizer.vocab_size}",
            repair="put the model's own tokenizer into its folder",
        )
    longest, at_once = config.limits(limit)
    if isinstance(limit, int) and longest > limit:
        raise ConfigError(
            "the reward model cannot read conversations of this length",
            path="rewards.reward_model.max_seq_len",
            value=longest,
            rule=f"at most {limit}, by the model's config.json",
            repair="lower it",
        )
    return RewardFolder(config, tokenizer, longest, at_once)


def check_template(folder: RewardFolder) -> None:
    """Refuse a tokenizer that cannot make text of messages."""
    if not folder.tokenizer.has_chat_template:
        raise ModelError(
            "the reward model's tokenizer has no chat template",
            path=_PATH,
            value=folder.config.path,
            rule="prompts of messages need one",
            repair="set rewards.reward_model.chat_template to the template that the model was trained with, or use "
            "prompts of text",
        )


def _unfit(value: object, rule: str) -> ModelError:
    return ModelError(
        "this is not a reward model",
        path=_PATH,
        value=str(value),
        rule=rule,
        repair="give the folder of a reward model: what `apps/reward_model` exports, or a Hugging Face classifier",
    )


class TransformersScorer:
    """A classifier of any family that `transformers` knows. Rows are padded to the longest of their batch."""

    def __init__(self, folder: RewardFolder) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        config = folder.config
        self._batch_size = config.batch_size
        self._device = torch.device("cuda" if config.with_gpus else "cpu")
        dtype = getattr(torch, config.chosen_precision)
        model: Any = AutoModelForSequenceClassification.from_pretrained(config.path, local_files_only=True, dtype=dtype)
        self._model = model.to(self._device).eval()

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row."""
        scores = [math.nan] * len(rows)
        for places in _in_batches(rows, self._batch_size):
            for place, score in zip(places, self._scores([list(rows[place]) for place in places]), strict=True):
                scores[place] = score
        return scores

    def _scores(self, rows: list[list[int]]) -> list[float]:
        """Score a few rows. The padding is a token that no row has: a model that looks for its last token by the pad's
        id then finds it, also where the end token is the pad."""
        import torch

        used = {token for row in rows for token in row}
        pad = next(token for token in range(len(used) + 1) if token not in used)
        if pad >= self._model.config.get_text_config().vocab_size and len(rows) > 1:
            return [score for row in rows for score in self._scores([row])]
        longest = max(len(row) for row in rows)
        ids_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self._device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        self._model.config.get_text_config().pad_token_id = self._model.config.pad_token_id = pad
        with torch.inference_mode():
            logits_B1 = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits
        return [float(score) for score in logits_B1[:, 0].float().tolist()]


def _in_batches(rows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the places of rows in batches of like lengths, so that little is padding."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    for start in range(0, len(order), size):
        yield order[start : start + size]


class RewardModel(ForgeActor):
    """Gives conversations scores. Callers pass one each; those that arrive together go through the model together.

    `make_scorer` loads the model: `forge.loops.reward_models` chooses it from `rewards.reward_model.engine`.

    Example:
        >>> model = await RewardModel.options(num_replicas=2).as_service(config.rewards.reward_model)
        >>> await model.score.route([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])

    A score does not depend on what else is in its batch, beyond what the order of floating-point sums makes of it.
    """

    def __init__(self, config: RewardModelConfig, make_scorer: MakeScorer = TransformersScorer) -> None:
        self.config = config
        self._make_scorer = make_scorer

    @endpoint
    def setup(self) -> None:
        """Load tokenizer and model. Any model but a classifier with one label raises `ModelError`."""
        self._folder = read_folder(self.config)
        self._scorer = self._make_scorer(self._folder)

    @endpoint(retry=True, batch=Batch(64, wait_s=0.005))
    def score(self, conversations: list[Conversation]) -> list[float | Exception]:
        """The score of each conversation. One that is too long, or that the chat template refuses, raises to its
        caller alone."""
        answers: list[float | Exception] = [math.nan] * len(conversations)
        rows: dict[int, list[int]] = {}
        for place, conversation in enumerate(conversations):
            try:
                rows[place] = self._token_ids(conversation)
            except (DataError, ModelError) as error:
                answers[place] = error
        if rows:
            for place, score in zip(rows, self._scorer(list(rows.values())), strict=True):
                answers[place] = score
        return answers

    def _token_ids(self, conversation: Conversation) -> list[int]:
        """Encode a conversation as pairs are encoded when a reward model is trained (`forge.data.reward_pairs`)."""
        tokenizer, longest = self._folder.tokenizer, self._folder.max_seq_len
        if isinstance(conversation, str):
            ids = tokenizer.encode_whole(conversation)
        else:
            check_template(self._folder)
            ids = tokenizer.encode_prompt([dict(each) for each in conversation], add_generation_prompt=False)
        if not 1 <= len(ids) <= longest:
            raise DataError(
                "the reward model cannot read a conversation of this length",
                path="rewards.reward_model.max_seq_len",
                value=len(ids),
                rule=f"1 to {longest} tokens; a score of a part would be meaningless",
                repair="raise it, up to the model's limit",
            )
        return ids
