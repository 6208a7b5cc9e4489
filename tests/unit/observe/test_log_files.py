"""Log files: they take a bounded part of the disk, and a full one does not end what writes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge.errors import ActorFailure, ConfigError, LaunchError
from forge.log_levels import LogLevels, LogOptions
from forge.observe.logs import LogFolder, current_folder, logging_to
from forge.observe.logs.folder import file_name
from forge.observe.logs.log_file import BoundedFile, as_record, notice, read_end


def test_a_flood_takes_a_bounded_part_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.log"
    file = BoundedFile(str(path), max_bytes=8192)
    for number in range(10_000):
        file.write(b"line %d\n" % number)
    file.close()
    file.close()
    sizes = {each.name: each.stat().st_size for each in path.parent.iterdir()}
    assert sizes.keys() == {"a.log", "a.log.1"}
    assert all(size <= 4096 for size in sizes.values())
    lines = (path.parent / "a.log.1").read_text().splitlines() + path.read_text().splitlines()
    assert lines[-1] == "line 9999"
    assert lines == [f"line {number}" for number in range(10_000 - len(lines), 10_000)], "the newest, and none is cut"


def test_a_file_is_continued(tmp_path: Path) -> None:
    for number in range(3):
        file = BoundedFile(str(tmp_path / "a.log"), max_bytes=4096)
        file.write(b"part %d\n" % number)
        file.close()
    assert (tmp_path / "a.log").read_text() == "part 0\npart 1\npart 2\n"


def test_one_write_may_be_larger_than_the_file(tmp_path: Path) -> None:
    file = BoundedFile(str(tmp_path / "a.log"), max_bytes=10)
    file.write(b"x" * 100)
    file.write(b"y" * 100)
    assert (tmp_path / "a.log").read_bytes() == b"y" * 100
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100


FULL = """
import resource, signal, sys
from forge.observe.logs.log_file import BoundedFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = BoundedFile(sys.argv[1], max_bytes=1 << 20)
file.write(b"before\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for _ in range(3):
    file.write(b"while it is full\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
file.write(b"after\\n")
"""


def test_a_full_disk_loses_lines_and_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    subprocess.run([sys.executable, "-c", FULL, str(path)], check=True, timeout=600)
    text = path.read_text()
    assert text.startswith("before\nwhi[")
    assert "bytes could not be written here]\nafter\n" in text


def test_the_end_of_a_file_is_what_it_ends_with(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n\nbar  10%\rbar 100%\n" + b"x" * 1000 + b"\n\xff\xfe\nlast")
    assert read_end(str(path), num_lines=9) == ["one", "bar 100%", "x" * 400, "\ufffd\ufffd", "last"]
    assert read_end(str(path), num_lines=2) == ["\ufffd\ufffd", "last"]
    assert read_end(str(path), num_lines=2, max_bytes=3) == ["ast"]
    assert read_end(str(tmp_path / "none"), num_lines=2) == []


def test_lines_of_json_files_are_objects() -> None:
    ours = b'{"time": "now", "message": "x"}\n'
    assert as_record(ours, "a") == ours
    for line in (b'{"time": broken\n', b"plain\r\n", b'{"time"', b"\xff\n", b""):
        found = json.loads(as_record(line, "a-0"))
        assert (found["logger"], found["process"], found["level"]) == ("output", "a-0", "info")
        assert found["message"] == line.rstrip(b"\r\n").decode("utf-8", "replace")
    assert json.loads(notice("a-0", "started", is_json=True))["message"].startswith("started (process ")


@pytest.mark.parametrize(
    ("label", "name"),
    [
        *[("generator[1]", "generator-1"), ("Actor", "Actor"), ("reward model", "reward-model"), ("../x", "..-x")],
        *[("", "process"), ("[]", "process"), ("a" * 200, "a" * 80), ("日本", "process")],
    ],
)
def test_labels_become_names_of_files(label: str, name: str) -> None:
    assert file_name(label).strip(".-") == name.strip(".-")
    assert "/" not in file_name(label)


def test_two_processes_never_share_a_file(tmp_path: Path) -> None:
    folder = LogFolder(tmp_path, max_bytes=1 << 20, options=None)
    names = [folder.claim("generator[0]") for _ in range(3)]
    assert names == ["generator-0", "generator-0-2", "generator-0-3"]
    folder.release("generator-0")
    assert folder.claim("generator[0]") == "generator-0"
    nested = LogFolder(tmp_path, max_bytes=1 << 20, options=None, parent="rewards-0")
    assert nested.claim("judge[0]") == "rewards-0.judge-0"


def test_a_process_gets_what_it_logs_with(tmp_path: Path) -> None:
    options = LogOptions(LogLevels("error", {"forge.x": "debug"}), "json")
    folder = LogFolder(tmp_path, max_bytes=77, options=options)
    assert folder.variables("trainer-0") == {
        "FORGE_LOG": "error,forge.x=debug",
        "FORGE_LOG_FORMAT": "json",
        "FORGE_VERBOSITY": "0",
        "FORGE_LOG_NAME": "trainer-0",
        "FORGE_LOG_FILE": str(tmp_path / "trainer-0.log"),
        "FORGE_LOG_MAX_BYTES": "77",
    }


@pytest.mark.parametrize("variable", [None, "FORGE_LOG_DIR"])
def test_a_folder_that_cannot_be_written_is_a_configuration_to_correct(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "logs"
    if variable is not None:
        monkeypatch.setenv(variable, str(place))
    with pytest.raises(ConfigError) as caught, logging_to(place, max_bytes=1 << 20):
        pass
    assert caught.value.path == variable or caught.value.path == "run.output_dir"
    assert (caught.value.value, caught.value.rule) == (str(place), "a folder in which this run may create files")
    assert caught.value.repair == "choose another one; or set run.max_log_mb=0 for no log files"
    assert current_folder() is None


def test_errors_show_the_end_of_a_log_file_wherever_they_go() -> None:
    import pickle

    log = ("/runs/a/logs/trainer-0.log", ("one", "two"))
    error = ActorFailure("trainer was lost", path="trainer", repair="start it again").with_log(log)
    text = (
        "trainer was lost\n  path:   trainer\n  repair: start it again\n"
        "  log:    /runs/a/logs/trainer-0.log, which ends with\n    | one\n    | two"
    )
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == text
    assert error.message == "trainer was lost"
    assert str(LaunchError("no").with_log(None)) == "no"
    assert str(LaunchError("no").with_log(("a.log", ()))) == "no\n  log:    a.log"


def test_the_file_is_this_processs_alone(tmp_path: Path) -> None:
    file = BoundedFile(str(tmp_path / "a.log"), max_bytes=100)
    assert not os.get_inheritable(file._file)
    file.close()
