"""What a program logs: in processes of their own, because `logging` is one for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOGS = """
import logging
for name in ("forge.a", "forge.service.x", "mine", "httpx"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(name).log(level, "%s", logging.getLevelName(level).lower())
"""


def run(program: str, folder: Path, **environ: str) -> tuple[str, str]:
    """What a program prints on standard output and standard error."""
    base = {name: value for name, value in os.environ.items() if not name.startswith("FORGE_")}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**base, **environ},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


def shown(text: str) -> set[str]:
    return {line.replace(": ", " ").split(" ", 1)[1] for line in text.splitlines()}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"forge.a": "WE", "forge.service.x": "WE", "mine": "WE", "httpx": "WE"}),
        ({"FORGE_VERBOSITY": "1"}, {"forge.a": "IWE", "forge.service.x": "IWE", "mine": "IWE", "httpx": "WE"}),
        ({"FORGE_VERBOSITY": "2"}, {"forge.a": "DIWE", "forge.service.x": "DIWE", "mine": "IWE", "httpx": "WE"}),
        ({"FORGE_VERBOSITY": "-1"}, dict.fromkeys(("forge.a", "forge.service.x", "mine", "httpx"), "E")),
        (
            {"FORGE_LOG": "error,forge.service=debug,httpx=info"},
            {"forge.a": "E", "forge.service.x": "DIWE", "mine": "E", "httpx": "IWE"},
        ),
        ({"FORGE_LOG": "mine=debug"}, {"forge.a": "WE", "forge.service.x": "WE", "mine": "DIWE", "httpx": "WE"}),
    ],
)
def test_records_are_shown_as_the_environment_says(
    environ: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    out, err = run(f"from forge.observe import start_logging\nassert start_logging()\n{LOGS}", tmp_path, **environ)
    found: dict[str, str] = {}
    for line in err.splitlines():
        level, name = line.partition(":")[0].split()
        found[name] = found.get(name, "") + level[0]
    assert (out, found) == ("", expected)


def test_json_records_are_objects_with_tracebacks_inside(tmp_path: Path) -> None:
    program = """
import logging
from forge.observe import start_logging
start_logging("info")
log = logging.getLogger("forge.x")
log.info("two\\nlines of %s", "text")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it broke")
logging.getLogger("forge.startup").info("trainer-0: loading weights took 1.5 s")
"""
    _, err = run(program, tmp_path, FORGE_LOG_FORMAT="json")
    first, second, third = map(json.loads, err.splitlines())
    assert first["message"] == "two\nlines of text"
    assert {name: first[name] for name in ("level", "logger", "process")} == {
        "level": "info",
        "logger": "forge.x",
        "process": "controller",
    }
    assert "ZeroDivisionError: division by zero" in second["exception"]
    assert third["logger"] == "forge.startup", "who reads JSON sees the phases of a start"


@pytest.mark.parametrize("is_early", [True, False])
def test_a_program_that_has_configured_logging_keeps_what_it_has(is_early: bool, tmp_path: Path) -> None:
    own = 'logging.basicConfig(level=logging.WARNING, format="mine %(message)s")\nassert not start_logging("debug")'
    program = f"""
import logging
from pathlib import Path
from forge.observe import start_logging
from forge.observe.logs import logging_to
{own if is_early else ""}
with logging_to(Path("logs"), max_bytes=1 << 20):
    {"pass" if is_early else own.replace(chr(10), chr(10) + "    ")}
    logging.getLogger("forge.x").info("not shown")
    logging.getLogger("forge.x").warning("shown")
logging.getLogger("forge.x").warning("after it")
"""
    _, err = run(program, tmp_path)
    early, late = ["mine shown", "mine after it"], ["mine not shown", "mine shown", "mine after it"]
    assert err.splitlines() == (early if is_early else late)
    assert "WARNING forge.x: shown" in (tmp_path / "logs" / "controller.log").read_text()


def test_a_program_that_has_configured_nothing_prints_what_python_prints(tmp_path: Path) -> None:
    program = """
import logging
from pathlib import Path
from forge.observe.logs import logging_to
log = logging.getLogger("forge.x")
log.warning("before")
with logging_to(Path("logs"), max_bytes=1 << 20):
    log.debug("nowhere")
    log.info("in the file")
    log.warning("in both")
log.warning("after")
assert logging.getLogger("forge").level == logging.NOTSET
assert not logging.getLogger("forge").handlers
"""
    _, err = run(program, tmp_path)
    assert err.splitlines() == ["before", "in both", "after"]
    lines = (tmp_path / "logs" / "controller.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines[1:-1]] == ["in the file", "in both"]
    assert "): started ====" in lines[0]
    assert "): ended ====" in lines[-1]


def test_files_have_more_than_the_console(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from forge.observe import start_logging
from forge.observe.logs import logging_to
start_logging("error")
with logging_to(Path("logs"), max_bytes=1 << 20):
    {LOGS.strip().replace(chr(10), chr(10) + "    ")}
print("after")
{LOGS}
"""
    out, err = run(program, tmp_path, FORGE_LOG="error,forge.service=debug")
    assert err.count("forge.a") == 2
    assert out == "after\n"
    text = (tmp_path / "logs" / "controller.log").read_text()
    names = ("forge.a", "forge.service.x", "mine")
    assert [sum(f" {name}: " in line for line in text.splitlines()) for name in names] == [3, 4, 3]
    assert " httpx: warning" in text
    assert " httpx: info" not in text


def test_what_ends_a_run_is_in_the_file_and_printed_once(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from forge.observe import start_logging
from forge.observe.logs import logging_to
start_logging("info")
for error in (RuntimeError("the run broke"), SystemExit(130), KeyboardInterrupt()):
    try:
        with logging_to(Path("logs"), max_bytes=1 << 20):
            raise error
    except BaseException as found:
        assert found is error
"""
    _, err = run(program, tmp_path)
    assert err == ""
    text = (tmp_path / "logs" / "controller.log").read_text()
    assert text.count("RuntimeError: the run broke") == 1
    assert 'File "<string>", line 9, in <module>' in text
    assert "): ended by SystemExit: 130 ====" in text
    assert "): ended by KeyboardInterrupt ====" in text


def test_json_files_have_an_object_on_each_line(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from forge.observe import start_logging
from forge.observe.logs import logging_to
start_logging("info")
with logging_to(Path("logs"), max_bytes=1 << 20):
    {LOGS.strip().replace(chr(10), chr(10) + "    ")}
"""
    run(program, tmp_path, FORGE_LOG_FORMAT="json")
    records = [json.loads(line) for line in (tmp_path / "logs" / "controller.log").read_text().splitlines()]
    assert [record["message"] for record in (records[1], records[-2])] == ["info", "error"]
    assert {record["process"] for record in records} == {"controller"}


def test_another_folder_can_be_named(tmp_path: Path) -> None:
    program = """
from pathlib import Path
from forge.observe.logs import current_folder, logging_to
assert current_folder() is None
with logging_to(Path("logs"), max_bytes=0) as none:
    assert none is None
with logging_to(Path("logs"), max_bytes=1 << 20) as folder:
    assert folder is current_folder()
    with logging_to(Path("other"), max_bytes=1 << 20) as same:
        assert same is folder
    print(folder.path)
"""
    out, _ = run(program, tmp_path, FORGE_LOG_DIR=str(tmp_path / "elsewhere"))
    assert out == f"{tmp_path}/elsewhere\n"
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
