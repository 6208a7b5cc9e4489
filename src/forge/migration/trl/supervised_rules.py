"""The tables of TRL's SFTConfig, DPOConfig, KTOConfig and RewardConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forge.migration.models import names_of
from forge.migration.reading import truth
from forge.migration.records import Converted, PeerConfig, Rule
from forge.migration.rules import always, as_float, changed, differs, joint, lacking, lacks, maps
from forge.migration.trl.batches import supervised_batch
from forge.migration.trl.model_rules import data_rule, sources_of

_VARIANTS: Final = {"sigmoid": "sigmoid", "hinge": "hinge", "robust": "robust"}


def _validation(config: PeerConfig) -> Converted | None:
    """Convert evaluation: validation losses on the test split."""
    if config["eval_strategy"] == "no" and not config["test_split_size"]:
        return None
    values: dict[str, Any] = {}
    todo = {}
    steps = config["eval_steps"] or config["logging_steps"]
    if config["eval_strategy"] == "steps" and isinstance(steps, int | float) and steps >= 1:
        values["validation.interval"] = int(steps)
    sources, _ = sources_of(config, split=config["dataset_test_split"] or "test")
    if config["test_split_size"]:
        values["validation.fraction"] = config["test_split_size"]
    elif sources and not config["datasets"]:
        values["validation.sources"] = sources
    else:
        todo["validation.sources"] = "the held-out records"
    note = "there is always a validation after the last step"
    return Converted(values, verdict="differs", note=note, todo=todo)


def _order(config: PeerConfig) -> Converted:
    """Convert the order of samples."""
    strategy = config["train_sampling_strategy"]
    shuffles = strategy in ("random", "group_by_length") or bool(config["shuffle_dataset"])
    if strategy == "group_by_length":
        note = "data.packing fills rows instead of sorting samples by length"
        return changed({"data.shuffle": True}, note)
    return Converted({"data.shuffle": shuffles})


def _template(config: PeerConfig) -> Converted | None:
    path = config["chat_template_path"]
    if not path:
        return None
    if str(path).endswith((".jinja", ".j2", ".jinja2")):
        return Converted({"data.chat_template": path})
    return lacking("data.chat_template is a Jinja file: save the template of that tokenizer in one")


def _oversize(config: PeerConfig) -> Converted:
    """Convert what happens to samples that are too long."""
    longest, mode = config["max_length"], config["truncation_mode"]
    values: dict[str, Any] = {"data.oversize": "truncate"}
    if longest is None:
        return Converted(values, todo={"training.max_seq_len": "max_length is null: the longest sample, in tokens"})
    values["training.max_seq_len"] = longest
    if mode == "keep_end":
        return lacking("a sample that is too long loses its end, not its beginning", values)
    return Converted(values)


def _dropped(config: PeerConfig) -> Converted:
    """Convert the longest pair of a reward model: longer ones are left out, as in TRL."""
    longest = config["max_length"]
    if longest is None:
        return Converted(todo={"training.max_seq_len": "max_length is null: the longest answer, in tokens"})
    return Converted({"training.max_seq_len": longest, "data.oversize": "drop"})


# ---- SFT


def _packing(config: PeerConfig) -> Converted:
    if not config["packing"]:
        return Converted({"data.packing": False})
    if config["packing_strategy"] == "bfd":
        return changed({"data.packing": True}, "a row holds whole samples, chosen from data.pack_lookahead at a time")
    note = f"packing_strategy {config['packing_strategy']} splits samples; here a row holds whole samples"
    return lacking(note, {"data.packing": True})


def _loss_on(config: PeerConfig) -> Converted:
    """Convert which tokens count."""
    completions = truth(config["completion_only_loss"])
    if config["assistant_only_loss"] or completions:
        return Converted({"data.loss_on": "answers"})
    if completions is False:
        return Converted({"data.loss_on": "all"})
    note = (
        "completion_only_loss null: TRL counts completions only where records have prompt and completion, and whole "
        "conversations otherwise; with records of prompt and completion set data.loss_on: answers"
    )
    return changed({"data.loss_on": "all"}, note)


def _loss(config: PeerConfig) -> Converted | None:
    if config["loss_type"] in ("nll", "chunked_nll"):
        return None
    return lacking(f"loss.function takes module:attribute of a loss of your own in place of {config['loss_type']}")


def _text_column(config: PeerConfig) -> Converted | None:
    name = config["dataset_text_field"]
    if not name or name == "text":
        return None
    return Converted(todo={"data.sources": f"columns: {{text: {name}}} in every source, whose text is in `{name}`"})


# ---- Preferences


def _preference(config: PeerConfig) -> Converted:
    """Convert the loss of pairs."""
    names = names_of(config["loss_type"])
    given = config["loss_weights"]
    weights = dict(zip(names, given, strict=False)) if isinstance(given, list) else dict.fromkeys(names, 1.0)
    main = [name for name in names if name != "sft"]
    values: dict[str, Any] = {"preference.kind": "dpo", "preference.beta": float(config["beta"])}
    smoothing = float(config["label_smoothing"] or 0.0)
    if len(main) != 1 or main[0] not in (*_VARIANTS, "ipo") or weights.get(main[0], 1.0) != 1.0:
        note = f"preference.kind is dpo, ipo, kto, orpo or simpo, and dpo has sigmoid, hinge and robust; not {names}"
        return lacking(note, values)
    if main[0] == "ipo":
        values["preference.kind"] = "ipo"
    else:
        values["preference.variant"] = _VARIANTS[main[0]]
    if main[0] == "robust":
        values["preference.label_smoothing"] = smoothing
    if "sft" in names:
        values["preference.nll_coefficient"] = float(weights["sft"])
    if smoothing and main[0] != "robust":
        note = f"label_smoothing has no effect on the loss {main[0]} of TRL; here it would: it is left out"
        return changed(values, note)
    return Converted(values)


def _reference(config: PeerConfig) -> Converted:
    """Convert where the reference's logprobs come from."""
    if config["precompute_ref_log_probs"]:
        return Converted({"reference.mode": "precomputed"})
    note = "a reference model beside the trainer, as in TRL; `precomputed` takes no memory and gives the same loss"
    return Converted({"reference.mode": "online"}, verdict="differs", note=note)


def _kto(config: PeerConfig) -> Converted:
    values: dict[str, Any] = {"preference.kind": "kto", "preference.beta": float(config["beta"])}
    values |= {
        "preference.desirable_weight": float(config["desirable_weight"]),
        "preference.undesirable_weight": float(config["undesirable_weight"]),
    }
    if config["loss_type"] != "kto":
        return lacking(f"preference.kind has no {config['loss_type']}: it becomes kto", values)
    return changed(values, "the KL is estimated over the batch of a step; TRL estimates it for each micro-batch")


_BATCH = joint(
    "per_device_train_batch_size gradient_accumulation_steps",
    "training.batch_size training.gradient_accumulation_steps",
    supervised_batch,
)
_EVALUATION = joint(
    "eval_strategy eval_steps dataset_test_split test_split_size",
    "validation.interval validation.sources validation.fraction",
    _validation,
)
_EVERY: list[Rule] = [
    _BATCH,
    _EVALUATION,
    always({"data.on_bad_record": "error"}, "a record that cannot be read ends the run"),
    lacks("eval_on_start eval_delay", "validation.interval says when, from the first step on"),
    lacks("dataset_num_proc", "tokens are made while the data is read ahead"),
    maps("activation_offloading", "training.activation_offload"),
    lacks("pad_to_multiple_of", "rows are packed, not padded"),
    lacks("remove_unused_columns", "the format of a record says what its columns are"),
    lacks("padding_free", "nothing is ever padded"),
    lacks("pad_token eos_token", "both are the tokenizer's own"),
]
_STREAM = joint(
    "dataset_streaming streaming",
    "data.streaming",
    lambda config: Converted({"data.streaming": bool(config["dataset_streaming"] or config["streaming"])}),
)
_ORDER = joint("train_sampling_strategy shuffle_dataset", "data.shuffle", _order)
_REFERENCE_NOTE = "the reference does not change during a run"
_PLAIN_PAIRS = "a prompt that is text gets the chat template here; TRL applies none to it: format: preference_text"
_PAIRS = "[{path: data/pairs.jsonl}] with prompt, chosen and rejected"

_SFT = [
    *_EVERY,
    _STREAM,
    data_rule(
        "data.sources",
        example="[{path: data/train.jsonl}] with `messages`",
        plain="`prompt` and `completion` that are text become a conversation here; TRL joins them as they are",
    ),
    joint("max_length truncation_mode", "training.max_seq_len data.oversize", _oversize),
    joint("packing packing_strategy", "data.packing", _packing),
    lacks("eval_packing", "validation is independent of packing"),
    joint("completion_only_loss assistant_only_loss", "data.loss_on", _loss_on),
    joint("loss_type", "", _loss),
    joint("chat_template_path", "data.chat_template", _template),
    joint("dataset_text_field", "data.sources", _text_column),
    lacks("dataset_kwargs", "the format of a record says how it is read"),
    _ORDER,
]
_PREFERENCE = [
    *_EVERY,
    _STREAM,
    joint("max_length truncation_mode", "training.max_seq_len data.oversize", _oversize),
    joint("precompute_ref_log_probs", "reference.mode", _reference),
    lacks("precompute_ref_batch_size", "training.microbatch_tokens bounds that pass as well"),
    lacks("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", _REFERENCE_NOTE),
    _ORDER,
]
_DPO = [
    *_PREFERENCE,
    data_rule("data.sources", example=_PAIRS, plain=_PLAIN_PAIRS),
    joint(
        "loss_type loss_weights beta label_smoothing",
        "preference.kind preference.variant preference.beta preference.label_smoothing preference.nll_coefficient",
        _preference,
    ),
    lacks(
        "ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau",
        "loss.function is not for pairs: these forms of DPO are not built in",
    ),
]
_KTO = [
    *_PREFERENCE,
    data_rule(
        "data.sources",
        example="[{path: data/answers.jsonl}] with prompt, completion and label",
        plain="a prompt that is text gets the chat template here; TRL applies none to it: format: unpaired_text",
    ),
    joint(
        "loss_type beta desirable_weight undesirable_weight",
        "preference.kind preference.beta preference.desirable_weight preference.undesirable_weight",
        _kto,
    ),
]
_REWARD = [
    *_EVERY,
    _STREAM,
    data_rule("data.sources", example=_PAIRS, plain=_PLAIN_PAIRS),
    joint("max_length", "training.max_seq_len data.oversize", _dropped),
    differs(
        "center_rewards_coefficient",
        "reward_model.centering_coefficient",
        "the same term; 0 is none",
        lambda value: as_float(value or 0.0),
    ),
    joint("chat_template_path", "data.chat_template", _template),
    _ORDER,
]

SUPERVISED_RULES: Mapping[str, list[Rule]] = {"sft": _SFT, "dpo": _DPO, "kto": _KTO, "reward": _REWARD}
