"""The files of a model with a scalar head, as `…ForSequenceClassification` of `transformers` reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_SETTINGS = "tokenizer_config.json"


def classifier_name(architecture: str) -> str:
    """Return the name of the classifier that belongs to a language model: Qwen3ForSequenceClassification."""
    return architecture.replace("ForCausalLM", "ForSequenceClassification")


def classifier_content(
    architecture: str, content: Mapping[str, Any], folder: Path, *, write: Callable[[Path, Mapping[str, Any]], None]
) -> dict[str, Any]:
    """Return what makes a `config.json` that of a classifier with one label, beside the tokenizer in `folder`.

    `transformers` takes the last token that is not the padding's for the last one of a text. So the padding must not be
    a token that ends texts. Where the tokenizer pads with such a token, it is given another padding token, if it has
    one (`write` writes its settings); otherwise there is none, and `transformers` scores one text at a time.
    """
    named = content.get("eos_token_id")
    ends = {*(named if isinstance(named, list) else [named])}
    settings = _read(folder / _SETTINGS)
    tokens = {token["content"]: token["id"] for token in _read(folder / "tokenizer.json").get("added_tokens") or ()}
    ends.add(tokens.get(_text(settings.get("eos_token"))))
    pad = tokens.get(_text(settings.get("pad_token")))  # what texts are padded with, whatever config.json names
    pad = content.get("pad_token_id") if pad is None else pad
    if pad in ends:
        others = [text for text, token in tokens.items() if "pad" in text.lower() and token not in ends]
        pad = tokens[others[0]] if others else None
        if others:
            write(folder / _SETTINGS, {**settings, "pad_token": others[0]})
    return {
        "architectures": [classifier_name(architecture)],
        "pad_token_id": pad,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON file; nothing where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _text(token: Any) -> Any:
    """Return the text of a special token, which a file may write as an object."""
    return token.get("content") if isinstance(token, dict) else token
