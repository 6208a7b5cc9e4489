"""`forge template check`: the table, the verdict, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chat_templates import ALTERNATING, THINKING, chatml_folder, llama_folder
from forge.cli import main


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from forge.models.tiny import make_tiny

    folder = tmp_path_factory.mktemp("plain") / "model"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return folder


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chatml_folder(tmp_path_factory.mktemp("thinking") / "model", THINKING)


def test_an_exact_template_passes(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(plain), "--strict"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{plain}, tool format ")
    assert any(line.split("  ")[0] == "an answer, then a question" and line.endswith("exact") for line in lines)
    assert lines[-1] == "All 9 continuations are exact."


def test_a_prefix_break_is_classified_and_shown(thinking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(thinking)]) == 0
    text = capsys.readouterr().out
    assert "prefix break (template)" in text
    assert "sampled '<think>" in text
    assert "1 starts a new branch" in text.splitlines()[-1]
    assert main(["template", "check", str(thinking), "--strict"]) == 1


def test_json_has_every_continuation(thinking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(thinking), "--json", "--tool-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tool_format"], found["is_exact"]) == ("json", False)
    by_name = {each["name"]: each for each in found["continuations"]}
    assert by_name["an answer, then a question"]["status"] == "exact"
    broken = by_name["an answer with reasoning, then a question"]
    assert (broken["status"], broken["prefix_break"]) == ("prefix_break", "template")


def test_another_template_is_a_file_and_its_refusals_are_shown(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jinja"
    file.write_text(ALTERNATING)
    assert main(["template", "check", str(plain), "--chat-template", str(file)]) == 0
    text = capsys.readouterr().out
    assert "roles must alternate" in text
    assert "refused by the template" in text.splitlines()[-1]


def test_the_end_of_a_turn_is_the_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = llama_folder(tmp_path / "model")
    assert main(["template", "check", str(folder), "--json"]) == 0
    by_name = {each["name"]: each for each in json.loads(capsys.readouterr().out)["continuations"]}
    assert by_name["an answer, then a question"]["status"] == "exact"
    assert by_name["an answer that ends with a space"]["prefix_break"] == "template"


def test_bad_input_is_named(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["template", "check", str(tmp_path / "nowhere")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("forge template: There is no tokenizer in this folder.")
    assert "repair:" in text
    assert main(["template", "check", str(plain), "--chat-template", str(tmp_path / "no.jinja")]) == 2
    assert "The chat template cannot be read." in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["template", "check", str(plain), "--tool-format", "xml"])
    assert ended.value.code == 2


def test_a_model_without_a_template_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = chatml_folder(tmp_path / "model", "")
    assert main(["template", "check", str(folder)]) == 2
    text = capsys.readouterr().err
    for part in ("the tokenizer has no chat template", "path:", "value:  None", "rule:", "repair: name a Jinja file"):
        assert part in text
