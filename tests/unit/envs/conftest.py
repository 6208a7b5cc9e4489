from __future__ import annotations

from pathlib import Path

import pytest

from chat_templates import THINKING, chatml_folder
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return ChatTokenizer.load(folder)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer whose template strips the reasoning of turns before the last question."""
    folder: Path = tmp_path_factory.mktemp("thinking") / "model"
    return ChatTokenizer.load(chatml_folder(folder, THINKING))
