"""What we do about faults of vLLM 0.32.0. Each test fails when vLLM has mended its own, and says what can go then."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kit import PROMPT, greedy

pytestmark = pytest.mark.alone  # engines that are killed leave semaphores, which other tests would take for theirs

PROGRAM = Path(__file__).parents[1] / "support" / "vllm_traps.py"


@pytest.fixture(scope="module")
def program() -> Iterator[tuple[subprocess.Popen[str], dict[str, dict[str, Any]]]]:
    """The program that walked into all of them, and what it said."""
    paths = [str(PROGRAM.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)
    said: dict[str, dict[str, Any]] = {}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                facts = json.loads(line)
                said[facts["trap"]] = facts
                if facts["trap"] == "orphans":
                    break
        assert "orphans" in said, f"the program ended with {process.wait()}"
        yield process, said
    finally:
        for pid in [process.pid, *said.get("orphans", {}).get("ours", []), *said.get("orphans", {}).get("theirs", [])]:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_tied_head_keeps_old_weights_after_a_reload(program):
    facts = program[1]["tied head"]
    assert facts["before"] < 1e-4
    assert facts["reloaded"] > 0.1, "vLLM has mended this: remove repack_tied_head"
    assert facts["repacked"] < 1e-4


def test_logprobs_of_prompts_end_an_engine_with_adapters(program):
    said = "vLLM has mended this: remove `is_singly` from score_one"
    assert program[1]["prompt logprobs with adapters"]["error"] is not None, said


def test_seeded_prompts_in_pieces_end_an_engine(program):
    said = "vLLM has mended this: remove enable_chunked_prefill from arguments.make_plan"
    assert program[1]["seeded prompts in pieces"]["error"] is not None, said


def test_speculated_tokens_have_no_temperature_on_the_cpu(program):
    said = "vLLM has mended this: remove check_speculation"
    assert program[1]["speculated temperatures"]["found"] == [-1.0] * 3, said


def test_an_engine_without_its_store_goes_on_with_what_it_has(program):
    facts = program[1]["no store"]
    assert facts["error"], "an update without a store must fail"
    assert facts["token_ids"] == greedy(1, PROMPT, 5)
    assert facts["version"] == 1


def test_engines_end_with_a_process_that_was_killed(program):
    process, said = program
    watched = {pid: os.pidfd_open(pid) for pid in (*said["orphans"]["ours"], *said["orphans"]["theirs"])}
    process.kill()
    process.wait()
    for pid in said["orphans"]["ours"]:
        assert select.select([watched[pid]], [], [], 600)[0], "our engine outlives its owner"
    for pid in said["orphans"]["theirs"]:
        assert not select.select([watched[pid]], [], [], 1)[0], "vLLM has mended this: remove _watch_owner"
    for descriptor in watched.values():
        os.close(descriptor)


BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
USE = "from transformers.image_utils import load_image"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"


def run(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture
def broken_torchvision(tmp_path: Path) -> Path:
    """A torchvision that is installed and cannot be imported, as PyPI's is beside a torch for the CPU."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(BROKEN)
    described = tmp_path / "torchvision-0.28.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    (described / "RECORD").write_text("torchvision/__init__.py,,\n")
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.site_of_the_user = True\n")
    return tmp_path


def test_a_broken_torchvision_breaks_transformers_unless_it_is_hidden(broken_torchvision):
    exposed = run(broken_torchvision, USE)
    assert exposed.returncode != 0, "transformers has mended this: remove hide_broken and the package hiding"
    assert "torchvision" in exposed.stderr
    hide = (
        "from forge.generator.vllm.environment import hide_broken, hide_from_children\n"
        "hidden = hide_broken()\n"
        "assert hidden == ['torchvision'], hidden\n"
        f"{USE}\n"
        "hide_from_children(hidden)\n"
        f"{CHILD}\n"
    )
    check = f"import sys; assert sys.site_of_the_user; {USE}"
    hidden = run(broken_torchvision, hide, check)
    assert hidden.returncode == 0, hidden.stderr
