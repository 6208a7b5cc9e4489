"""What the samples of an evaluation depend on, as plain values: compared when one continues, shown when two differ."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from forge._version import __version__
from forge.config import EvalConfig
from forge.config.loading import to_plain
from forge.loops.evals.tasks import EvalTasks

_WHOLE_BYTES: Final = 2 << 30
_BLOCK: Final = 1 << 20
_NUM_BLOCKS: Final = 64
_ENGINE_KEYS: Final = ("engine", "max_seq_len", "kv_cache_dtype", "precision", "chat_template", "engine_args")
_EPISODE_KEYS: Final = ("kind", "args", "tool_format")
_REWARD_KEYS: Final = ("functions", "on_error", "overlong", "judge", "reward_model")


def eval_settings(config: EvalConfig, tasks: EvalTasks, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the samples depend on. What only decides how they are run or counted is left out."""
    plain = to_plain(config)
    sampling = {key: value for key, value in plain["generator"]["sampling"].items() if key not in ("n", "seed")}
    settings: dict[str, Any] = {
        "forge": __version__,
        "target": dict(target),
        "tasks": {"digest": tasks.digest, "count": len(tasks)},
        "prompts": {key: plain["prompts"][key] for key in ("system_prompt", "template", "chat")},
        "num_samples": config.eval.num_samples,
        "seed": config.run.seed,
        "sampling": sampling,
    }
    if config.eval.endpoint is None:
        settings["engine"] = {key: plain["generator"][key] for key in _ENGINE_KEYS}
    if config.episode.kind is not None:
        settings["episode"] = {key: plain["episode"][key] for key in _EPISODE_KEYS}
        settings["episode"]["limits"] = plain["episode"]["evaluation_limits"] or plain["episode"]["limits"]
        settings["episode"]["source"] = source_digest(config.episode.kind)
        if config.episode.agents:
            settings["episode"]["agents"] = plain["episode"]["agents"]
    else:
        settings["rewards"] = {key: plain["rewards"][key] for key in _REWARD_KEYS}
        own = [each.kind for each in config.rewards.functions if ":" in each.kind]
        settings["rewards"]["sources"] = {kind: source_digest(kind) for kind in own}
    return settings


def source_digest(name: str) -> str | None:
    """Return the digest of the file of `module:attribute`; None for a module without one."""
    found = importlib.util.find_spec(name.partition(":")[0])
    if found is None or found.origin is None or not os.path.isfile(found.origin):
        return None
    return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=8).hexdigest()


def folder_digest(folder: Path) -> str:
    """Return a digest of a model's folder: its configuration, tokenizer and weights.

    Weights of more than 2 GiB are not read whole: of each file, its size and 64 blocks of 1 MiB spread over it. Then
    the digest starts with `sampled:`.
    """
    files = sorted(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".jinja", ".model", ".txt")
    )
    total = sum(path.stat().st_size for path in files)
    is_whole = total <= _WHOLE_BYTES
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        for block in _blocks(path, is_whole=is_whole):
            digest.update(block)
    return digest.hexdigest() if is_whole else f"sampled:{digest.hexdigest()}"


def _blocks(path: Path, *, is_whole: bool) -> Iterable[bytes]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if is_whole or size <= _NUM_BLOCKS * _BLOCK:
            yield from iter(lambda: file.read(_BLOCK), b"")
            return
        for number in range(_NUM_BLOCKS):
            file.seek(number * (size - _BLOCK) // (_NUM_BLOCKS - 1))
            yield file.read(_BLOCK)


def code_version() -> dict[str, Any]:
    """Return which code runs: the library's version, and its commit where it is a checkout."""
    place = Path(__file__).resolve().parent
    found: dict[str, Any] = {"forge": __version__, "commit": None, "is_modified": None}
    try:
        commit = _git(place, "rev-parse", "HEAD")
        if commit:
            found |= {"commit": commit, "is_modified": bool(_git(place, "status", "--porcelain", "--", str(place)))}
    except (OSError, subprocess.SubprocessError):
        return found  # there is no git here
    return found


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
