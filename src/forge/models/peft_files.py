"""Adapters in the files of PEFT: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forge.config.adapter import TARGET_NAMES, AdapterConfig
from forge.config.schema import ModelConfig
from forge.errors import ModelError
from forge.models.adapter_names import PEFT_PREFIX, AdapterSlot, AdapterSpec, adapter_map
from forge.models.weight_names import HEAD, SCORE

if TYPE_CHECKING:
    from torch import Tensor, nn

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
_SCORE: Final = PEFT_PREFIX + SCORE
_PLAIN: Final[Mapping[str, Any]] = {
    "alora_invocation_tokens": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "layer_replication": None,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "exclude_modules": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
}
"""Keys of PEFT's configuration that mean something else than a plain adapter where they have another value."""
_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is. Others, such as pissa and olora, take their start from
the base: such an adapter belongs to what is left of it."""


def resolve_adapter(config: AdapterConfig, model: ModelConfig) -> AdapterSpec:
    """Return the adapter that a section asks for: with a `path`, the one in the folder.

    Raises `ModelError` for a folder that is not a plain LoRA adapter, and for a key that contradicts it.
    """
    if config.path is None:
        return AdapterSpec.of(config, model)
    found = read_spec(Path(config.path))
    for key in ("rank", "alpha", "rslora", "targets"):
        if getattr(config, key) is None:
            continue
        asked = getattr(AdapterSpec.of(config, model), key)
        if asked != getattr(found, key):
            raise ModelError(
                f"adapter.{key} contradicts the adapter in adapter.path.",
                path=f"adapter.{key}",
                value=getattr(config, key),
                rule=f"{config.path} has {getattr(found, key)}",
                repair="remove the key, or remove adapter.path to train a new adapter",
            )
    return replace(found, base_dtype=config.base_dtype)


def read_spec(folder: Path) -> AdapterSpec:
    """Return the shape of the adapter in a folder."""
    path = folder / CONFIG_FILE
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The folder's {CONFIG_FILE} cannot be read: {error}",
            path=str(path),
            rule="a folder that PEFT's save_pretrained or this library wrote",
            repair="give the folder that holds adapter_config.json and adapter_model.safetensors",
        ) from error
    if not isinstance(said, dict) or said.get("peft_type") != "LORA":
        raise _refused(path, "peft_type", said.get("peft_type") if isinstance(said, dict) else said, "LORA")
    for key, plain in _PLAIN.items():
        if said.get(key, plain) not in (plain, None):
            raise _refused(path, key, said[key], f"{plain!r}: a plain LoRA adapter")
    if said.get("modules_to_save") not in (None, [], ["score"], ["classifier", "score"]):
        raise _refused(path, "modules_to_save", said["modules_to_save"], "null, or [score] for a reward model")
    if said.get("init_lora_weights") not in _STARTS:
        rule = "true, false, gaussian, eva or orthogonal: others change the weights below the adapter"
        raise _refused(path, "init_lora_weights", said["init_lora_weights"], rule)
    rank, alpha = said.get("r"), said.get("lora_alpha", 8)
    if not isinstance(rank, int) or rank < 1:
        raise _refused(path, "r", rank, "a whole number, at least 1")
    if not isinstance(alpha, int | float):
        raise _refused(path, "lora_alpha", alpha, "a number")
    rslora = bool(said.get("use_rslora"))
    return AdapterSpec(rank, float(alpha), _targets_in(folder / WEIGHTS_FILE), rslora=rslora)


def _targets_in(path: Path) -> tuple[str, ...]:
    """Return which layers have an adapter. `target_modules` may be a pattern or parts of names; the tensors are plain.

    That all layers of a name have one is checked when they are loaded.
    """
    with _opened(path) as file:
        layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in file.keys() if ".lora_" in name}  # noqa: SIM118
    if not layers or not layers <= set(TARGET_NAMES):
        raise _refused(path, "layer", sorted(layers - set(TARGET_NAMES)), f"some of {', '.join(TARGET_NAMES)}")
    return tuple(name for name in TARGET_NAMES if name in layers)


def load_adapter(parts: Sequence[nn.Module], folder: Path, model: ModelConfig, spec: AdapterSpec) -> None:
    """Fill the adapters of this rank's parts of a model from a PEFT folder, in place.

    Each rank reads the rows and columns that it holds. A folder that lacks a tensor, has one too many or one of another
    shape raises `ModelError`, on every rank. The output layer of a classifier is loaded too, where the folder has it.
    """
    import torch
    from torch.distributed.tensor import DTensor

    from forge.models.weights import local_box, named_parameters

    path = folder / WEIGHTS_FILE
    slots = adapter_map(model, spec)
    with _opened(path) as file, torch.no_grad():
        _check_names(file, path, slots, has_score=model.head == "scalar")
        sources = {name: files for slot in slots for name, files in zip(slot.names, slot.peft_names, strict=True)}
        if model.head == "scalar" and _SCORE in file.keys():  # noqa: SIM118
            sources[HEAD] = (_SCORE,)
        for name, parameter in named_parameters(parts):
            if name not in sources:
                continue
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            box = local_box(parameter)
            if parameter.ndim == 2:
                local.copy_(file.get_slice(sources[name][0])[box])
            else:
                for at, expert in enumerate(range(box[0].start, box[0].stop)):
                    local[at].copy_(file.get_slice(sources[name][expert])[box[1:]])


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFolder:
    """An adapter as it was read: its shape, its whole tensors under our names, and the digest of the folder."""

    spec: AdapterSpec
    tensors: Mapping[str, Tensor]
    digest: str


def read_adapter_folder(folder: Path, model: ModelConfig) -> AdapterFolder:
    """Read an adapter of a model from a PEFT folder into host memory. `ModelError` if it is not one of this model."""
    import torch

    path, digest = folder / WEIGHTS_FILE, adapter_digest(folder)
    spec = read_spec(folder)
    slots, tensors = adapter_map(model, spec), dict[str, "Tensor"]()
    with _opened(path) as file:
        _check_names(file, path, slots, has_score=False)
        for slot in slots:
            for name, files in zip(slot.names, slot.peft_names, strict=True):
                parts = [file.get_tensor(each) for each in files]
                tensors[name] = parts[0] if slot.base.fused is None else torch.stack(parts)
    if adapter_digest(folder) != digest:
        raise ModelError(
            "The adapter's files changed while they were read.",
            path=str(folder),
            rule="a folder that is complete",
            repair="load it again; write new adapters to a folder of their own",
        )
    return AdapterFolder(spec, tensors, digest)


def adapter_digest(folder: Path) -> str:
    """Return the digest of an adapter: `cat adapter_config.json adapter_model.safetensors | sha256sum`."""
    found = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        try:
            with open(folder / name, "rb") as file:
                while block := file.read(1 << 20):
                    found.update(block)
        except OSError as error:
            raise ModelError(
                f"This is not a LoRA adapter: {name} cannot be read ({error.strerror}).",
                path="load_adapter(path)",
                value=str(folder),
                rule=f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, as PEFT writes them",
                repair="check the path; it is read on the generator's host",
            ) from error
    return found.hexdigest()


def read_adapter(folder: Path, model: ModelConfig, spec: AdapterSpec) -> dict[str, Tensor]:
    """Return the tensors of the adapter in a PEFT folder, under PEFT's names.

    A folder that lacks a tensor, has one too many or one of another shape raises `ModelError`.
    """
    path = folder / WEIGHTS_FILE
    with _opened(path) as file:
        _check_names(file, path, adapter_map(model, spec), has_score=False)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def peft_views(tensors: Mapping[str, Tensor], slots: Sequence[AdapterSlot]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors that have our names under PEFT's names, which split stacks of experts."""
    for slot in slots:
        for name, files in zip(slot.names, slot.peft_names, strict=True):
            pieces = (tensors[name],) if slot.base.fused is None else tensors[name].unbind(0)
            yield from zip(files, pieces, strict=True)


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, model: ModelConfig, spec: AdapterSpec, base: str | None = None
) -> None:
    """Write an adapter as PEFT does, from whole tensors under our names: a folder that PEFT and vLLM load.

    `base` is where the model comes from, for PEFT's `base_model_name_or_path`. The output layer of a classifier is
    written with it if it is among the tensors.
    """
    from safetensors.torch import save_file

    views = peft_views(tensors, adapter_map(model, spec))
    found = {name: view.detach().cpu().contiguous().clone() for name, view in views}
    has_score = model.head == "scalar" and HEAD in tensors
    if has_score:
        found[_SCORE] = tensors[HEAD].detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    said = {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": ["score"] if has_score else None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": list(spec.targets),
        "task_type": "SEQ_CLS" if model.head == "scalar" else "CAUSAL_LM",
        "use_rslora": spec.rslora,
        **_PLAIN,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"The adapter's weights cannot be read: {error}",
            path=str(path),
            rule="a safetensors file beside adapter_config.json",
            repair="save the adapter again with PEFT's save_pretrained, which writes safetensors",
        ) from error


def _check_names(file: Any, path: Path, slots: Sequence[AdapterSlot], *, has_score: bool) -> None:
    expected: dict[str, tuple[int, ...]] = {}
    for slot in slots:
        for names, shape in zip(slot.peft_names, slot.shapes, strict=True):
            expected.update(dict.fromkeys(names, shape[-2:]))
    given = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if has_score:
        given.pop(_SCORE, None)
    wrong = sorted(name for name in expected.keys() | given.keys() if expected.get(name) != given.get(name))
    if wrong:
        raise ModelError(
            f"The adapter is not one of this model: {len(wrong)} tensors differ in name or shape.",
            path=f"{path}:{wrong[0]}",
            value=given.get(wrong[0], "not there"),
            rule=f"shape {expected[wrong[0]]}" if wrong[0] in expected else "the model has no place for it",
            repair="give the model that the adapter was trained on as model.path",
        )


def _refused(path: Path, key: str, value: object, rule: str) -> ModelError:
    return ModelError(
        f"The adapter has a {key} that is not supported.",
        path=f"{path}:{key}",
        value=value,
        rule=rule,
        repair="merge it into the model with PEFT's merge_and_unload, and train a new adapter on the result",
    )
