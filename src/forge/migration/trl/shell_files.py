"""Command lines of TRL in shell scripts: `trl grpo --beta 0.04`, `accelerate launch trl/scripts/sft.py …`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from forge.migration.reading import flags, flat_values, no_command, read_sections, read_text
from forge.migration.records import Given
from forge.migration.shell_words import Word, commands

_KINDS: Final = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
_LAUNCH: Final = {
    "num_processes": "num_processes",
    "nproc_per_node": "num_processes",
    "num_machines": "num_machines",
    "config_file": "accelerate_config",
}
"""Options of `accelerate launch` and torchrun in front of the script, and what this reader calls them."""


def read_shell(text: str, *, where: str) -> tuple[str | None, dict[str, Given]]:
    """Return the kind of run that a script starts, if it says so, and the keys that it gives.

    A file that `--config` names, relative to the script, is read first; the command line wins.
    """
    for words in commands(text):
        start = _start(words)
        if start is None:
            continue
        kind = next((kind for kind in _KINDS if Path(words[start].text).stem == kind), None)
        given = dict(flags(words[start + 1 :], where=where))
        for key, each in flags(words[:start], where=where):
            if (name := _LAUNCH.get(key.replace("-", "_"))) is not None:
                given.setdefault(name, each)
        return kind, _with_file(given, where)
    raise no_command(where, wanted="trl grpo --config FILE")


def _start(words: list[Word]) -> int | None:
    """Where the arguments of TRL start: after `trl KIND`, or after a script of that name; None for another command."""
    texts = [word.text for word in words]
    for index, word in enumerate(texts):
        if word == "trl" and index + 1 < len(texts) and texts[index + 1] in _KINDS:
            return index + 1
        if word.endswith(".py") and any(each.startswith("--") for each in texts[index + 1 :]):
            return index
    return None


def _with_file(given: dict[str, Given], where: str) -> dict[str, Given]:
    named = given.get("config")
    if named is None or not isinstance(named.value, str):
        return given
    path = Path(where).parent / named.value
    data, lines = read_sections(read_text(path), "yaml", where=str(path))
    return dict(flat_values(data, lines, where=str(path), known=data)) | given
