"""The tables of TRL's ModelConfig, ScriptArguments and DatasetMixtureConfig, and of arguments of its trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.migration.models import adapter_targets, is_unreadable_path, model_values, names_of, source_place
from forge.migration.records import Converted, PeerConfig, Rule
from forge.migration.rules import changed, joint, lacking, lacks

_USUAL_TARGETS = ["q_proj", "v_proj"]
"""What PEFT adapts in a Llama or Qwen where no target modules are named."""


def _model(config: PeerConfig) -> Converted:
    return model_values(config["model_name_or_path"], key="model_name_or_path", revision=config["model_revision"])


def _adapter(config: PeerConfig) -> Converted | None:
    if not config["use_peft"]:
        return None
    values: dict[str, Any] = {"adapter.rank": config["lora_r"], "adapter.alpha": float(config["lora_alpha"] or 1)}
    named = config["lora_target_modules"]
    targets, note = adapter_targets(named or _USUAL_TARGETS)
    notes = [note] if note else []
    if targets is None:
        notes.append(f"adapter.targets cannot be told from {named}: all linear layers have an adapter")
        targets = "all"
    elif not named:
        notes.append("without lora_target_modules PEFT adapts q_proj and v_proj; here all linear layers is the default")
    values["adapter.targets"] = targets
    if config["use_rslora"]:
        values["adapter.rslora"] = True
    if config["lora_dropout"]:
        notes.append(f"there is no dropout on an adapter; TRL's is {config['lora_dropout']:g}")
    return changed(values, "; ".join(notes)) if notes else Converted(values)


def _quantized(config: PeerConfig) -> Converted | None:
    if not config["load_in_4bit"] and not config["load_in_8bit"]:
        return None
    if not config["use_peft"]:
        return lacking("weights in few bits are for adapters: set the section adapter")
    if config["load_in_8bit"]:
        return Converted({"adapter.base_dtype": "int8"})
    if config["bnb_4bit_quant_type"] == "nf4":
        return Converted({"adapter.base_dtype": "nf4"})
    return lacking("4 bits are nf4 here", {"adapter.base_dtype": "nf4"})


def _attention(config: PeerConfig) -> Converted | None:
    chosen = config["attn_implementation"]
    if chosen is None:
        return None
    if str(chosen).endswith("flash_attention_4"):
        return Converted({"training.attention": "flash_attn_4"})
    return lacking("training.attention: FlashAttention 4 where it is installed, otherwise torch's own")


def sources_of(config: PeerConfig, *, split: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the sources of data that a script names, and what is lost of them."""
    mixture = config["datasets"]
    if isinstance(mixture, list) and mixture:
        mixed = [_mixed(each) if isinstance(each, Mapping) else ({}, "a dataset is a mapping") for each in mixture]
        return [source for source, _ in mixed if source], [note for _, note in mixed if note]
    name = config["dataset_name"]
    if not isinstance(name, str) or is_unreadable_path(name):
        return [], []
    source: dict[str, Any] = dict(source_place(name))
    if "hf_dataset" in source:
        source |= {"hf_config": config["dataset_config"]} if config["dataset_config"] else {}
        source |= {"split": split} if split != "train" else {}
    return [source], []


def _mixed(each: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A dataset of a mixture."""
    files = each.get("data_files")
    if isinstance(files, str):
        return {"path": files}, ""
    if not isinstance(each.get("path"), str):
        return {}, "a dataset without a path"
    source: dict[str, Any] = dict(source_place(each["path"]))
    source |= {"hf_config": each["name"]} if each.get("name") else {}
    source |= {"split": each["split"]} if each.get("split", "train") != "train" else {}
    lost = [key for key in ("data_dir", "data_files", "columns", "fraction") if each.get(key)]
    return source, f"{', '.join(lost)} of {each['path']} not converted" if lost else ""


def _reads_solution(config: PeerConfig) -> bool:
    """Whether rewards of TRL compare with the column `solution`, which is `answer` here."""
    return bool({"accuracy_reward", "reasoning_accuracy_reward"} & set(map(str, names_of(config["reward_funcs"]))))


def data_rule(key: str, *, example: str, plain: str) -> Rule:
    """Return the rule of where data comes from. `key` is ours; `plain` says what to do about records of plain text, to
    which TRL applies no chat template."""

    def convert(config: PeerConfig) -> Converted:
        sources, notes = sources_of(config, split=config["dataset_train_split"] or "train")
        if _reads_solution(config):
            sources = [{**source, "columns": {"answer": "solution"}} for source in sources]
        if not sources:
            return Converted(todo={key: f"where the data is, such as {example}"}, note="" if notes else None)
        if config["dataset_changes"]:
            how = "prompts.template and columns do the usual part, a file with the changed records the rest"
            notes.append(f"the script changes the data ({config['dataset_changes']}): {how}")
        return changed({key: sources}, "; ".join([plain, *notes]))

    return joint("dataset_name dataset_config dataset_train_split datasets dataset_changes", key, convert)


MODEL_RULES = [
    joint("model_name_or_path model_revision", "model.path model.hf_repo", _model),
    joint("attn_implementation", "training.attention", _attention),
    joint(
        "use_peft lora_r lora_alpha lora_dropout lora_target_modules use_rslora",
        "adapter.rank adapter.alpha adapter.targets adapter.rslora",
        _adapter,
    ),
    joint("load_in_8bit load_in_4bit bnb_4bit_quant_type", "adapter.base_dtype", _quantized),
    lacks("use_bnb_nested_quant bnb_4bit_quant_storage", "scales of 4-bit weights are not quantised again"),
    lacks("lora_target_parameters", "adapter.targets: experts adapts the experts of a mixture of experts"),
    lacks("lora_modules_to_save", "an adapter trains low-rank matrices only"),
    lacks("lora_task_type", "the kind of run says it"),
    lacks("use_dora", "adapters are LoRA, with or without rank stabilisation"),
    lacks(
        "trust_remote_code",
        "models are defined by the library (`forge.models.families`); no code of a repository is run",
    ),
    lacks("router_aux_loss_coef", "there is no auxiliary loss of the router"),
    lacks("disable_dropout", "the models have no dropout"),
    lacks("ignore_bias_buffers", "there is no DDP that would need it"),
    lacks("config", "the file that it names is read with this one"),
    lacks("peft_config.*", "of an adapter, rank, alpha, targets and rslora can be set: see the guide on LoRA"),
    lacks("trainer.*", "an argument of the trainer that has no key: see the guide on writing your own"),
]
