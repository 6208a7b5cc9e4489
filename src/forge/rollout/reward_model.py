"""`RewardModel`: a classifier with one label, behind a service."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forge.config.rewards import RewardModelConfig
from forge.errors import DataError, ModelError
from forge.runtime.endpoints import Batch, endpoint
from forge.service.actor import ForgeActor

Conversation = str | Sequence[Mapping[str, Any]]
"""What is scored: text as it is, or messages, the last of which is the completion."""


class RewardModel(ForgeActor):
    """Gives conversations numbers. Callers pass one each; those that arrive together go through the model together.

    Example:
        >>> model = await RewardModel.options(num_replicas=2).as_service(config.rewards.reward_model)
        >>> await model.score.route([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])

    A number does not depend on what else is in its batch, beyond what the order of floating-point sums makes of it.
    """

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config

    @endpoint
    def setup(self) -> None:
        """Load tokenizer and model. Any model but a classifier with one label raises `ModelError`."""
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        folder = Path(self.config.path)
        if not (folder / "config.json").is_file():
            raise self._unfit(folder, "a folder with config.json, weights and a tokenizer")
        facts = AutoConfig.from_pretrained(folder, local_files_only=True)
        heads = [name for name in facts.architectures or () if name.endswith("ForSequenceClassification")]
        if facts.num_labels != 1 or not heads:
            found = f"{', '.join(facts.architectures or ()) or 'no architecture'}, {facts.num_labels} labels"
            raise self._unfit(found, "a model for sequence classification with one label")
        self._device = torch.device("cuda" if self.config.with_gpus else "cpu")
        dtype = torch.bfloat16 if self.config.with_gpus else torch.float32
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True, dtype=dtype)
        self._model = model.to(self._device).eval()

    def _unfit(self, value: object, rule: str) -> ModelError:
        return ModelError(
            "this is not a reward model",
            path="rewards.reward_model.path",
            value=str(value),
            rule=rule,
            repair="give the folder of a Hugging Face reward model",
        )

    @endpoint(retry=True, batch=Batch(64, wait_s=0.005))
    def score(self, conversations: list[Conversation]) -> list[float | Exception]:
        """The number of each conversation. One that is too long, or that the chat template refuses, raises to its
        caller alone."""
        answers: list[float | Exception] = [math.nan] * len(conversations)
        rows: dict[int, list[int]] = {}
        for place, conversation in enumerate(conversations):
            try:
                rows[place] = self._token_ids(conversation)
            except (DataError, ModelError) as error:
                answers[place] = error
        for places in _in_batches(rows, self.config.batch_size):
            for place, number in zip(places, self._numbers([rows[place] for place in places]), strict=True):
                answers[place] = number
        return answers

    def _token_ids(self, conversation: Conversation) -> list[int]:
        from jinja2 import TemplateError

        if isinstance(conversation, str):
            ids = list(self._tokenizer(conversation)["input_ids"])
        elif not self._tokenizer.chat_template:
            raise ModelError(
                "the reward model's tokenizer has no chat template",
                path="rewards.reward_model.path",
                value=self.config.path,
                rule="prompts of messages need one",
                repair="add chat_template.jinja to its folder, or use prompts of text",
            )
        else:
            messages = [dict(message) for message in conversation]
            try:
                text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            except TemplateError as error:
                reason = f"the reward model's chat template refuses this: {error}"
                raise DataError(reason, path="messages", value=messages) from None
            ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 1 <= len(ids) <= self.config.max_seq_len:
            raise DataError(
                "the reward model cannot read a conversation of this length",
                path="rewards.reward_model.max_seq_len",
                value=len(ids),
                rule=f"1 to {self.config.max_seq_len} tokens; a score of a part would be meaningless",
                repair="raise it, up to the model's limit",
            )
        return ids

    def _numbers(self, rows: list[list[int]]) -> list[float]:
        """The model's numbers of a few rows. The padding is a token that no row has: a model that looks for its last
        token by the pad's id then finds it, also where the end token is the pad."""
        import torch

        used = {token for row in rows for token in row}
        pad = next(token for token in range(len(used) + 1) if token not in used)
        if pad >= self._model.config.get_text_config().vocab_size and len(rows) > 1:
            return [number for row in rows for number in self._numbers([row])]
        longest = max(len(row) for row in rows)
        ids_BT = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self._device)
        mask_BT = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        self._model.config.get_text_config().pad_token_id = self._model.config.pad_token_id = pad
        with torch.inference_mode():
            logits_B1 = self._model(input_ids=ids_BT, attention_mask=mask_BT).logits
        return [float(number) for number in logits_B1[:, 0].float().tolist()]


def _in_batches(rows: Mapping[int, Sequence[int]], size: int) -> Iterator[list[int]]:
    """The places of rows in batches of like lengths, so that little is padding."""
    order = sorted(rows, key=lambda place: len(rows[place]))
    for start in range(0, len(order), size):
        yield order[start : start + size]
