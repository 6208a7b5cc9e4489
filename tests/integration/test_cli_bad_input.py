"""Bad input to every command: one short error that names what to do, the right exit status, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forge.cli import main, make_parser
from forge.cli.run import read_program, split_configs
from forge.recipes import Command

FORGE = [sys.executable, "-m", "forge.cli"]
LIMIT_S = 600


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what commands are pointed at by mistake. Nobody can write below /proc, root neither."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forge"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    Path("empty").mkdir()
    Path("grpo.yaml").write_text("rollout: {staleness: 1}\n")
    Path("broken.yaml").write_text("a: [1\n")
    Path("broken.py").write_text("x = (\n")
    Path("binary.py").write_bytes(b"\0\1\2")
    Path("app").mkdir()
    Path("app/main.py").write_text("")
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "values": {"train/loss": 2.0}}) + "\n")
    return tmp_path


LOGGING = ("chaos x.yaml", "eval run", "serve run", "worker", "distill x.yaml", "ui", "chat run")
"""Commands that take the flags of logging."""

CASES = [
    ("quickstart training.max_stepz=3", "did you mean `training.max_steps`?"),
    ("quickstart --output empty/../grpo.yaml", "a folder"),
    ("recipes nothing like this", "a name that `forge recipes` lists"),
    ("recipes grpo/tinny --json", "did you mean `grpo/tiny`?"),
    ("copy grpo/tinny x", "did you mean `grpo/tiny`?"),
    ("copy grpo/tiny grpo.yaml", "a folder that can be written"),
    ("copy grpo/tiny /proc/x", "a folder that can be written"),
    ("copy sft/tiny app", "a folder without main.py"),
    ("new app", "a folder that is empty, or that does not exist"),
    ("new grpo.yaml", "a folder that is empty, or that does not exist"),
    ("new x --task digit", "did you mean `digits`?"),
    ("new /proc/x", "a folder that can be written"),
    ("doctor run.seed=3", "overrides with --config only"),
    ("doctor --config nowhere.yaml", "the file must exist"),
    ("doctor --config broken.yaml", "broken.yaml"),
    ("run grpo/tinny", "did you mean `grpo/tiny`?"),
    ("run grpo/tiny --config nowhere.yaml", "a YAML file that exists, or a recipe"),
    ("plan grpo/tinny", "the file must exist"),
    ("run grpo.yaml", "repair: forge run grpo --config grpo.yaml"),
    ("run 'nowhere.yaml'", "there is no such script"),
    ("run broken.py", r"never closed (line 1)"),
    ("run binary.py", "null bytes"),
    ("run empty", "this is a folder"),
    ("run app --config grpo.yaml", "name a file in it, such as app/main.py"),
    ("run broken.py --config nowhere.yaml", "SCRIPT"),
    ("job slurm nowhere.py --config grpo.yaml", "there is no such script"),
    ("control nowhere", "there is no such run"),
    ("control nowhere set training.learning_rate", "this does not say which key gets which value"),
    ("scale nowhere generators=2", "there is no such run"),
    ("hosts nowhere --add tcp://127.0.0.1:1", "there is no such run"),
    ("chaos nowhere.yaml", "there is no such configuration file"),
    ("history nowhere", "no history that could be checked"),
    ("replay nowhere --step 1", "this is not the folder of a run"),
    ("bisect nowhere", "this is not the folder of a run"),
    ("plan nowhere.yaml", "nowhere.yaml"),
    ("plan empty", "this is a directory"),
    ("plan broken.yaml", "broken.yaml"),
    ("plan model.preset=tiny --gpu-memory much", "--gpu-memory"),
    ("report nowhere", "there is no such run"),
    ("report empty", "metrics.jsonl"),
    ("report run --output empty", "Is a directory"),
    ("report run --output /proc/report.html", "give another --output"),
    ("report run --max-samples -1", "--max-samples"),
    ("chat", "forge chat needs one model"),
    ("chat nowhere", "model.path"),
    ("chat empty", "must hold a config.json"),
    ("chat grpo.yaml", "repair: --config grpo.yaml"),
    ("chat run", "a model is in run/checkpoints/hf once the run has ended"),
    ("chat --config nowhere.yaml", "the file must exist"),
    ("chat model.preset=tiny --temperature hot", "generator.sampling.temperature"),
    ("serve nowhere --port 0", "model.path"),
    ("serve run", "a model is in run/checkpoints/hf once the run has ended"),
    ("serve model.preset=tiny --port 99999", "serve.port"),
    ("serve model.preset=tiny --port 0 --record /proc/record.jsonl", "serve.record"),
    ("serve model.preset=tiny --host 0.0.0.0", "FORGE_API_KEY"),
    ("config check nowhere.yaml", "the file must exist"),
    ("config check broken.yaml", "broken.yaml"),
    ("config show empty", "this is a directory"),
    ("config show --schema json:loads", "--schema"),
    ("import trl nowhere.yaml", "the file must exist"),
    ("import trl empty", "this is a directory"),
    ("import trl broken.yaml", "must be valid YAML"),
    ("import trl broken.py", "never closed"),
    ("import trl binary.py", "null bytes"),
    ("import trl grpo.yaml --kind ppo", "--kind"),
    ("import verl grpo.yaml", "at least one key of verl"),
    ("import titanrl app/main.py", "a function that returns Controller.Config"),
    ("rewards try nowhere:f --text a", "cannot be imported"),
    ("rewards try exakt --text a", "exact"),
    ("rewards try exact --text a --answer a x", "must be NAME=VALUE"),
    ("rewards try exact --text a --metadata [", "--metadata"),
    ("episode try nowhere:f --task a", "cannot be imported"),
    ("episode try --config nowhere.yaml", "the file must exist"),
    ("episode try --config grpo.yaml", "episode.kind"),
    ("eval", "nothing scores the answers"),
    ("eval --run run", "this is not the folder of a run"),
    ("eval --model empty --tasks nowhere.jsonl --reward exact", "there is no data at nowhere.jsonl"),
    ("eval show nowhere", "this is not the folder of an evaluation"),
    ("eval compare run", "one evaluation cannot be compared"),
    ("league show nowhere", "this run has no table of a league"),
    ("ui nowhere", "there is no such folder of runs"),
    ("ui empty --host 0.0.0.0", "without TLS"),
    ("ui empty --port 99999", "--port"),
    ("distill nowhere.yaml", "the file must exist"),
    ("algorithms grpoo", "did you mean `grpo`?"),
    ("env check nowhere:f", "cannot be imported"),
    ("env check json:loads", "is not an episode"),
    ("template check nowhere", "There is no tokenizer in this folder."),
    ("template check run", "a model is in run/checkpoints/hf once the run has ended"),
    ("diagnose empty", "the folder of a run"),
    ("diagnose nowhere", "nowhere/metrics.jsonl"),
    ("download 'a b' --output-dir x", "REPO"),
    ("download a/b --output-dir grpo.yaml", "--output-dir"),
    ("download a/b --output-dir x --max-workers 0", "--max-workers"),
    ("worker --address nonsense", "--address"),
    *[(f"{command} --log-level loud", "--log-level") for command in LOGGING],
    ("run --log-level loud app/main.py", "--log-level"),
    ("run --log-level info,forge= app/main.py", "one of debug, info, warning, error, critical"),
    ("worker --log-format xml", "one of text, json"),
    ("worker --address tcp://192.0.2.1:1", "--address"),
]


@pytest.mark.parametrize("line", ["run", "run --config grpo.yaml"])
def test_only_the_script_is_named_as_missing(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: SCRIPT\n")


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line for line, _ in CASES])
def test_bad_input_is_explained(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err + captured.out


def test_every_command_is_tried() -> None:
    commands = set(make_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr,arg-type]
    assert commands - {line.split()[0] for line, _ in CASES} == set()


def test_the_command_for_a_configuration_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my runs").mkdir()
    Path("my runs/first.yaml").write_text("rollout: {staleness: 1}\n")
    assert main(["run", "my runs/first.yaml", "run.name=a b", "--resume"]) == 2
    (command,) = re.findall(r"repair: forge (.*)", capsys.readouterr().err)
    _, script, *words = shlex.split(command)
    program = read_program(Path(script), *split_configs([], words))
    assert program.script.is_file()
    assert program.command == Command(("my runs/first.yaml",), ("run.name=a b", "--resume"))


def test_resume_is_in_the_help_and_may_stand_before_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "--resume" in capsys.readouterr().out
    Path("show.py").write_text("import sys; print(*sys.argv[1:])")
    for words in (["--resume", "show.py"], ["show.py", "--resume"]):
        assert main(["run", *words, "run.seed=3"]) == 0
        assert sorted(capsys.readouterr().out.split()) == ["--resume", "run.seed=3"]


def test_what_the_system_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "a" * 300]) in (1, 2)
    assert "File name too long" in capsys.readouterr().err


def test_a_scripts_own_system_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    Path("opens.py").write_text("open('nowhere.txt')")
    assert main(["run", "opens.py"]) == 1
    assert "opens.py" in capsys.readouterr().err


# ---- Standard streams


def in_shell(redirected: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell starts it, with a redirection behind it."""
    command = ["bash", "-c", f'exec "$@" {redirected}', "bash", *FORGE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def closed_pipe() -> int:
    """The writing end of a pipe that nothing reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize(
    ("words", "code"),
    [(("rewards",), 1), (("config", "presets"), 1), (("run", "prints.py"), 1), (("run", "prints_little.py"), 1)],
)
def test_a_pipe_that_nothing_reads(words: tuple[str, ...], code: int) -> None:
    Path("prints.py").write_text("for number in range(100000): print(number)")
    Path("prints_little.py").write_text("print('little')")
    pipe = closed_pipe()
    try:
        ended = subprocess.run(
            [*FORGE, *words], stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    finally:
        os.close(pipe)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.mark.parametrize(
    ("redirected", "code", "text"),
    [
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", 1, "forge: standard output: No space left on device\n"),
    ],
)
def test_standard_output_that_takes_nothing(redirected: str, code: int, text: str) -> None:
    ended = in_shell(redirected, "rewards")
    assert (ended.returncode, ended.stderr) == (code, text)
