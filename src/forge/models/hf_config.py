"""Read and write a Hugging Face `config.json`.

Whatever in a `config.json` changes what the model computes is either a key of `ModelConfig` or must have the one value
that our model definitions have. Anything else is refused by name: a model that is built slightly wrong still
trains, and the error goes unnoticed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from forge.config import ModelConfig
from forge.errors import MISSING, ModelError
from forge.models.architecture import ARCHITECTURE_KEYS, complete
from forge.models.classifier_files import classifier_content, classifier_name
from forge.models.families import FAMILIES, Family, family_of, find_family, supported_families

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")

_COPIED: Final = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of special tokens that a `config.json` names. `eos` may be several; None where there is none."""

    bos: int | None = None
    eos: int | tuple[int, ...] | None = None
    pad: int | None = None


def read_hf_config(folder: str | Path, *, family: str | None = None) -> ModelConfig:
    """Read the architecture of the model in a folder, and nothing else: no path, no name.

    `family` is needed only for one that is not registered: `module:attribute`, as in `model.family`.

    Both ways of writing rotary embeddings are read (`rope_theta` with `rope_scaling`, and `rope_parameters`), and where
    a key may be absent it means what it means to `transformers`. Raises `ModelError` for everything that our model
    definitions do not compute.
    """
    file = _ConfigFile.open(Path(folder) / "config.json")
    found = _family(file, family if family and ":" in family else None)
    for key, allowed in (*_FIXED.items(), *found.fixed.items()):
        file.must_be(key, allowed)
    _check_windows(file, found)
    keys: dict[str, Any] = {
        "family": family if family and ":" in family else found.name,
        "num_layers": file.integer("num_hidden_layers"),
        "hidden_size": file.integer("hidden_size"),
        "intermediate_size": file.integer("intermediate_size"),
        "num_heads": file.integer("num_attention_heads"),
        "vocab_size": file.integer("vocab_size"),
        "max_seq_len": file.integer("max_position_embeddings"),
        "tie_embeddings": file.boolean("tie_word_embeddings", default=False),
        "norm_eps": file.number("rms_norm_eps", default=1e-6),
        **_read_head(file),
        **_read_rope(file),
    }
    for key, name, otherwise in (
        ("num_key_value_heads", "num_kv_heads", keys["num_heads"]),
        ("head_dim", "head_dim", keys["hidden_size"] // keys["num_heads"]),
    ):
        keys[name] = file.integer(key, default=otherwise if key in file.content else found.absent.get(key, otherwise))
    if found.has_experts:
        experts = "num_experts" if file.get("num_experts") is not None else "num_local_experts"
        keys["num_experts"] = file.integer(experts)
        keys["num_experts_per_token"] = file.integer("num_experts_per_tok")
        keys["expert_intermediate_size"] = file.integer("moe_intermediate_size")
    try:
        return ModelConfig(**keys)
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(str(key) for key in first["loc"]) or first.get("ctx", {}).get("key") or "config.json"
        raise file.refusal(at, keys.get(at, MISSING), first["msg"], "correct the file, or fetch it again") from None


def write_hf_config(
    config: ModelConfig,
    folder: str | Path,
    *,
    source: str | Path | None = None,
    dtype: str = "float32",
    special_ids: SpecialIds | None = None,
) -> None:
    """Write a `config.json` that `transformers` and vLLM load as this model.

    With `source`, the folder that the model came from, its `config.json` is kept as it is but for the dtype, and the
    files that go with a model (tokenizer, chat template, generation settings, licence) are copied along; weights are
    not. The source must still hold the same architecture. Without it the file is made from the configuration, and
    `special_ids` says which tokens begin, end and pad. A model with a scalar head is written as a classifier with one
    label, `…ForSequenceClassification`.
    """
    config = complete(config)
    if dtype not in DTYPES:
        raise ModelError(
            "The dtype of a config.json is not known.",
            path="dtype",
            value=dtype,
            rule=f"one of {', '.join(DTYPES)}",
            repair="choose one of them",
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        content = _make_content(config, dtype, special_ids or SpecialIds())
    else:
        content = _content_of(Path(source), config, dtype)
        _copy_companions(Path(source), folder)
    if config.head == "scalar":
        content |= classifier_content(family_of(config).architecture, content, folder, write=write_json)
    write_json(folder / "config.json", content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file under its name only when it is whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu", None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}


class _ConfigFile:
    """A `config.json` whose keys are read with their types, and refused by name."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path, self.content = path, content

    @classmethod
    def open(cls, path: Path) -> _ConfigFile:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ModelError(
                "The model's config.json cannot be read.",
                path=str(path),
                rule=f"a file that can be read: {error.strerror}",
                repair="check the folder, or fetch the model with `forge download`",
            ) from None
        except ValueError as error:
            raise _not_json(path, str(error)) from None
        if not isinstance(content, dict):
            raise _not_json(path, "the top level is not an object")
        return cls(path, content)

    def get(self, key: str) -> Any:
        return self.content.get(key)

    def refusal(self, key: str, value: object, rule: str, repair: str | None = None) -> ModelError:
        return ModelError(
            "The model's config.json describes something that is not supported.",
            path=f"{self.path}: {key}",
            value=value,
            rule=rule,
            repair=repair or "use a model without it; docs/guides/models.md lists what works",
        )

    def must_be(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value not in allowed:
            raise self.refusal(key, value, f"only {_words(allowed)} is supported")

    def integer(self, key: str, *, default: int | None = None) -> int:
        return int(self._typed(key, default, lambda value: isinstance(value, int), "a whole number"))

    def number(self, key: str, *, default: float | None = None) -> float:
        return float(self._typed(key, default, lambda value: isinstance(value, int | float), "a number"))

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, value, "must be true or false", "correct the file, or fetch it again")
        return value

    def _typed(self, key: str, default: Any, is_right: Callable[[Any], bool], kind: str) -> Any:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not is_right(value) or value <= 0:
            found = value if key in self.content else MISSING
            raise self.refusal(key, found, f"must be {kind} above 0", "correct the file, or fetch it again")
        return value


def _not_json(path: Path, reason: str) -> ModelError:
    return ModelError(
        "The model's config.json cannot be read.",
        path=str(path),
        rule=f"a JSON object: {reason}",
        repair="fetch the file again with `forge download`",
    )


def _words(allowed: Iterable[Any]) -> str:
    return " or ".join(json.dumps(value) for value in allowed)


def _family(file: _ConfigFile, given: str | None) -> Family:
    """Return the family that the file names, or the given one if the file names its architecture."""
    known = [find_family(given)] if given else list(FAMILIES.values())
    listed = file.get("architectures") or []
    named = listed[0] if isinstance(listed, list) and listed else None
    key, asked = ("architectures", named) if named is not None else ("model_type", file.get("model_type"))
    for family in known:
        names = (family.architecture, classifier_name(family.architecture)) if named is not None else (family.name,)
        if asked in names:
            return family
    raise ModelError(
        "This family of models is not supported.",
        path=f"{file.path}: {key}",
        value=asked,
        rule=f"{given} is for {known[0].architecture}" if given else f"supported are {supported_families()}",
        repair="choose a model of one of these families; docs/guides/models.md says how to add one",
    )


def _read_head(file: _ConfigFile) -> dict[str, str]:
    """Read which output layer the model has. A classifier must have one label, which is its scalar."""
    listed = file.get("architectures") or [""]
    if not str(listed[0]).endswith("ForSequenceClassification"):
        return {}
    labels = file.get("id2label")
    number = len(labels) if isinstance(labels, dict) else file.get("num_labels") or 2
    if number != 1:
        raise file.refusal("id2label", labels, f"a classifier must have 1 label; this one has {number}")
    return {"head": "scalar"}


def _check_windows(file: _ConfigFile, family: Family) -> None:
    """Refuse sliding windows that are in use. A window that is switched off is the common case, and harmless."""
    kinds = file.get("layer_types") or []
    others = [kind for kind in kinds if kind != "full_attention"]
    if others:
        raise file.refusal("layer_types", others[0], "only full_attention is supported")
    if family.window == "none" or not file.get("use_sliding_window") or file.get("sliding_window") is None:
        return
    first = file.get("max_window_layers") if family.window == "upper" and not kinds else None
    if kinds or (isinstance(first, int) and first >= file.integer("num_hidden_layers")):
        return
    raise file.refusal("use_sliding_window", True, "only attention to the whole sequence is supported")


def _read_rope(file: _ConfigFile) -> dict[str, Any]:
    """Read rotary embeddings, with the precedence of `transformers`: the dictionary first, then the top level."""
    key = "rope_scaling" if file.get("rope_scaling") else "rope_parameters"
    content = file.get(key) or {}
    if not isinstance(content, dict) or any(isinstance(value, dict) for value in content.values()):
        raise file.refusal(key, content, "must be one object for all layers")
    rope = _ConfigFile(file.path, {f"{key}.{name}": value for name, value in content.items()})
    theta = f"{key}.rope_theta"
    keys: dict[str, Any] = {
        "rope_theta": rope.number(theta) if theta in rope.content else file.number("rope_theta", default=10_000.0)
    }
    rope.must_be(f"{key}.partial_rotary_factor", (1, None))
    kind = content.get("rope_type") or content.get("type") or "default"
    if kind == "default":
        return keys
    if kind != "llama3":
        raise file.refusal(f"{key}.rope_type", kind, "only default and llama3 are supported")
    before = file.get("original_max_position_embeddings") or file.integer("max_position_embeddings")
    if file.get("original_max_position_embeddings") is None:
        before = rope.integer(f"{key}.original_max_position_embeddings", default=before)
    factors = {name: rope.number(f"{key}.{name}") for name in ("factor", "low_freq_factor", "high_freq_factor")}
    keys["rope_scaling"] = {**factors, "original_max_seq_len": before}
    return keys


def _make_content(config: ModelConfig, dtype: str, special_ids: SpecialIds) -> dict[str, Any]:
    """Make the content, in the older form of rotary embeddings and dtype, which old and new readers understand."""
    family = family_of(config)
    eos = list(special_ids.eos) if isinstance(special_ids.eos, tuple) else special_ids.eos
    scaling = config.rope_scaling
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "attention_dropout": 0.0,
        "bos_token_id": special_ids.bos,
        "eos_token_id": eos,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_seq_len,
        "model_type": family.name,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": special_ids.pad,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        },
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }
    content |= {key: allowed[0] for key, allowed in family.fixed.items()}
    if family.has_experts:
        content |= {
            "moe_intermediate_size": config.expert_intermediate_size,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
        }
    return dict(sorted(content.items()))


def _content_of(source: Path, config: ModelConfig, dtype: str) -> dict[str, Any]:
    found = read_hf_config(source, family=config.family)
    for key in ARCHITECTURE_KEYS:
        if getattr(found, key) != getattr(config, key):
            raise ModelError(
                "The folder that the model came from now holds another model.",
                path=str(source / "config.json"),
                value={key: getattr(found, key)},
                rule=f"the model that is written has {key} {getattr(config, key)!r}",
                repair="write without a source, or restore the folder",
            )
    content = dict(_ConfigFile.open(source / "config.json").content)
    for key in [name for name in ("dtype", "torch_dtype") if name in content] or ["torch_dtype"]:
        content[key] = dtype
    return content


def _copy_companions(source: Path, folder: Path) -> None:
    if source.resolve() == folder.resolve():
        return
    for pattern in _COPIED:
        for found in sorted(source.glob(pattern)):
            if found.is_dir():
                shutil.copytree(found, folder / found.name, dirs_exist_ok=True)
            elif not found.name.endswith((".safetensors", ".bin", ".index.json")):
                shutil.copyfile(found, folder / found.name)
