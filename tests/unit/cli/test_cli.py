"""The `forge` command: what it offers, what it passes on to a script, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge import __version__
from forge.cli import main

TELL = """
import json, sys
from pathlib import Path
Path(__file__).with_name("told.json").write_text(json.dumps({"argv": sys.argv, "path": sys.path, "name": __name__}))
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; what `forge run` changes in this process is changed back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forge"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def told(folder: str = ".") -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(folder, "told.json").read_text())
    return facts


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for command in ("run", "chat", "config", "download", "doctor", "worker"):
        assert f"\n    {command} " in text


def test_the_version_is_the_librarys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"forge {__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["walk"], ["run"], ["doctor", "--loud"], ["run", "--nproc_per_node", "two", "x"]]
)
def test_what_is_no_command_line_ends_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: forge" in capsys.readouterr().err


def test_the_module_is_the_command() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "forge.cli", "--version"], capture_output=True, text=True, timeout=600, check=False
    )
    assert (asked.returncode, asked.stdout) == (0, f"forge {__version__}\n")


# ---- forge run


def test_the_script_gets_configuration_and_overrides_as_its_arguments() -> None:
    script, config = write("tell.py", TELL), write("a.yaml", "{}")
    words = ["a.b=c=d", "~a.c", "--own-flag", "x y"]
    assert main(["run", script, "--config", config, *words]) == 0
    assert told()["argv"] == [script, "--config", config, *words]
    assert told()["name"] == "__main__"


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "a.yaml", "--config=b.yaml", "SCRIPT", "k=v"],
        ["SCRIPT", "--config", "a.yaml", "--config", "b.yaml", "k=v"],
        ["SCRIPT", "k=v", "--config=a.yaml", "--config", "b.yaml"],
        ["--config", "a.yaml", "SCRIPT", "--config", "b.yaml", "k=v"],
        ["SCRIPT", "--config", "a.yaml", "k=v", "--config", "b.yaml"],
    ],
)
def test_configurations_may_stand_anywhere_and_keep_their_order(words: list[str]) -> None:
    write("a.yaml", "{}"), write("b.yaml", "{}")
    script = write("tell.py", TELL)
    assert main(["run", *(script if word == "SCRIPT" else word for word in words)]) == 0
    assert told()["argv"][1:] == ["--config", "a.yaml", "--config", "b.yaml", "k=v"]


def test_the_scripts_own_folder_is_searched_first() -> None:
    script = write("app/tell.py", "import beside\n" + TELL)
    write("app/beside.py", "")
    assert main(["run", script]) == 0
    assert told("app")["path"][0] == str(Path("app").resolve())


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('the disk is full')", 1, "the disk is full\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_the_scripts_end_is_the_commands(ending: str, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", write("end.py", ending)]) == code
    assert capsys.readouterr().err == text


def test_the_scripts_exception_is_shown_with_its_traceback() -> None:
    script = write("fail.py", "def inner():\n    raise KeyError('mine')\ninner()")
    ended = subprocess.run(
        [sys.executable, "-m", "forge.cli", "run", script], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 1
    assert "in inner" in ended.stderr
    assert ended.stderr.endswith("KeyError: 'mine'\n")


def test_a_wrong_configuration_is_explained_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    script = write("wrong.py", "from forge.errors import ConfigError\nraise ConfigError('no', path='a.b', repair='c')")
    assert main(["run", script]) == 2
    assert capsys.readouterr().err == "forge run: no\n  path:   a.b\n  repair: c\n"


def test_a_failure_while_running_is_no_wrong_input_and_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    script = write(
        "lost.py",
        "from forge.errors import ActorFailure\n"
        "def train():\n"
        "    error = ActorFailure('the trainer was lost', path='trainer')\n"
        "    error.add_note('Remote traceback: far away')\n"
        "    raise error\n"
        "train()\n",
    )
    assert main(["run", script]) == 1
    text = capsys.readouterr().err
    for part in ("in train", "the trainer was lost", "Remote traceback: far away"):
        assert part in text


@pytest.mark.parametrize("script", ["absent.py", ".", "folder"])
def test_a_script_that_is_not_there_is_named(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    assert main(["run", script]) == 2
    text = capsys.readouterr().err
    what = "there is no such script" if script == "absent.py" else "this is a folder"
    assert text.startswith(f"forge run: {what}\n  path:   SCRIPT\n")
    for part in (f"value:  {script!r}", "rule:   a Python file that exists", "repair: check the path"):
        assert part in text


@pytest.mark.parametrize("words", [["--config", "absent.yaml"], ["k=v", "--config=absent.yaml"]])
def test_a_configuration_that_is_not_there_is_named_before_the_script_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", write("tell.py", TELL), *words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("forge run: there is no such configuration file\n  path:   --config\n")
    for part in ("value:  'absent.yaml'", "rule:   a YAML file that exists", "repair: check the path"):
        assert part in text
    assert not Path("told.json").exists()


def test_a_configuration_flag_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", write("tell.py", TELL), "k=v", "--config"]) == 2
    text = capsys.readouterr().err
    for part in ("path:   --config", "rule:   ", "repair: "):
        assert part in text
    assert not Path("told.json").exists()


@pytest.mark.parametrize("number", ["0", "-2"])
def test_less_than_one_rank_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc_per_node", number, write("tell.py", TELL)]) == 2
    text = capsys.readouterr().err
    for part in ("path:   --nproc_per_node", f"value:  {number}", "rule:   N >= 1", "repair: leave the flag out"):
        assert part in text
    assert not Path("told.json").exists()


# ---- forge worker


@pytest.mark.parametrize("address", ["nonsense", "http://h:1", "tcp://h", "tcp://[::1:1"])
def test_a_worker_refuses_a_bad_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--address", address]) == 2
    text = capsys.readouterr().err
    assert text.startswith("forge worker: this is not a worker's address\n")
    for part in (
        "path:   forge worker --address",
        f"value:  {address!r}",
        "rule:   tcp://HOST:PORT",
        "repair: write it like tcp://",
    ):
        assert part in text


def test_a_worker_listens_on_loopback_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "--help"])
    assert "default: tcp://127.0.0.1:22222" in " ".join(capsys.readouterr().out.split())
