"""What FORGE_LOG, -v, -q and --log-format say."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.config import GRPOConfig, from_command_line
from forge.errors import OptionError
from forge.log_levels import (
    LEVELS,
    LogLevels,
    LogOptions,
    add_log_flags,
    apply_log_flags,
    parse_with_log_flags,
    verbosity,
)


def test_a_level_is_of_all_loggers_or_of_those_below_a_name() -> None:
    levels = LogLevels.parse("info, forge.service=DEBUG,httpx=error", path="FORGE_LOG")
    assert levels == LogLevels("info", {"forge.service": "debug", "httpx": "error"})
    assert str(levels) == "info,forge.service=debug,httpx=error"
    names = ("forge", "forge.service", "forge.service.x", "forge.services", "httpx", "mine", "")
    assert [levels.of(name) for name in names] == ["info", "debug", "debug", "info", "error", "info", "info"]
    assert LogLevels.parse("", path="FORGE_LOG").of("mine") == "warning"


@given(
    default=st.none() | st.sampled_from(LEVELS),
    named=st.dictionaries(st.from_regex(r"[a-z_][\w]{0,5}(\.[a-z]{1,3})?", fullmatch=True), st.sampled_from(LEVELS)),
)
def test_levels_are_read_as_they_are_written(default: str | None, named: dict[str, str]) -> None:
    levels = LogLevels(default, named)
    assert LogLevels.parse(str(levels), path="FORGE_LOG") == levels


@pytest.mark.parametrize(
    ("text", "value", "rule", "repair"),
    [
        (
            "loud",
            "loud",
            "one of debug, info, warning, error, critical",
            "write for example info, or info,forge.service=debug",
        ),
        ("inf", "inf", "one of debug, info, warning, error, critical", "did you mean `info`?"),
        (
            "info,forge=",
            "forge=",
            "one of debug, info, warning, error, critical",
            "write for example info, or info,forge.service=debug",
        ),
        ("3x=info", "3x=info", "the name of a logger is letters, digits and `_`, joined by dots", None),
        ("=info", "=info", "the name of a logger is letters, digits and `_`, joined by dots", None),
    ],
)
def test_what_is_no_level_is_named(text: str, value: str, rule: str, repair: str | None) -> None:
    with pytest.raises(OptionError) as caught:
        LogLevels.parse(text, path="--log-level")
    assert (caught.value.path, caught.value.value, caught.value.rule) == ("--log-level", value, rule)
    assert caught.value.repair == (repair or "write for example info, or info,forge.service=debug")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "warning"),
        ({"FORGE_LOG": "error"}, "error"),
        ({"FORGE_LOG": "forge.store=debug"}, "warning,forge.store=debug"),
        ({"FORGE_VERBOSITY": "1"}, "info"),
        ({"FORGE_VERBOSITY": "9"}, "debug"),
        ({"FORGE_VERBOSITY": "-1", "FORGE_LOG": "info"}, "warning"),
        ({"FORGE_VERBOSITY": "-9"}, "critical"),
    ],
)
def test_the_environment_says_how_much(environ: dict[str, str], expected: str) -> None:
    options = LogOptions.from_environment("warning", environ)
    assert str(options.levels) == expected
    assert LogOptions.from_environment("debug", options.variables()) == options


@pytest.mark.parametrize(
    ("environ", "path", "rule"),
    [
        ({"FORGE_LOG_FORMAT": "yaml"}, "FORGE_LOG_FORMAT", "one of text, json"),
        ({"FORGE_LOG": "x"}, "FORGE_LOG", "one of debug, info, warning, error, critical"),
        ({"FORGE_VERBOSITY": "much"}, "FORGE_VERBOSITY", "a whole number: 1 for -v, -1 for -q"),
    ],
)
def test_a_wrong_environment_is_refused(environ: dict[str, str], path: str, rule: str) -> None:
    with pytest.raises(OptionError) as caught:
        LogOptions.from_environment("info", environ)
    assert (caught.value.path, caught.value.rule) == (path, rule)
    assert caught.value.value == environ[path]
    assert caught.value.repair


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["-v"], {"FORGE_VERBOSITY": "1"}),
        (["-vvq"], {"FORGE_VERBOSITY": "1"}),
        (["-q", "--quiet"], {"FORGE_VERBOSITY": "-2"}),
        (["--log-level", "INFO,a=debug"], {"FORGE_LOG": "info,a=debug"}),
        (["--log-format", "JSON"], {"FORGE_LOG_FORMAT": "json"}),
    ],
)
def test_flags_become_variables_for_every_process(words: list[str], expected: dict[str, str]) -> None:
    parser = argparse.ArgumentParser()
    add_log_flags(parser)
    environ: dict[str, str] = {}
    apply_log_flags(parser.parse_args(words), environ)
    assert environ == expected


def test_flags_add_to_what_the_environment_says() -> None:
    parser = argparse.ArgumentParser()
    add_log_flags(parser)
    environ = {"FORGE_VERBOSITY": "1"}
    apply_log_flags(parser.parse_args(["-v"]), environ)
    assert verbosity(environ) == 2


@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        (["--log-level", "loud"], {}, "path:   --log-level"),
        (["--log-format", "xml"], {}, "path:   --log-format"),
        ([], {"FORGE_LOG": "loud"}, "path:   FORGE_LOG"),
    ],
)
def test_a_program_refuses_what_is_wrong_as_any_argument(
    words: list[str],
    environ: dict[str, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        parse_with_log_flags(argparse.ArgumentParser(), words)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_programs_take_the_flags_among_their_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORGE_LOG", "FORGE_LOG_FORMAT", "FORGE_VERBOSITY"):
        monkeypatch.setenv(name, {"FORGE_LOG_FORMAT": "text", "FORGE_VERBOSITY": "0"}.get(name, "info"))
    config = from_command_line(GRPOConfig, ["run.seed=7", "-v", "--log-format", "json", "run.name=x"])
    assert (config.run.seed, config.run.name) == (7, "x")
    options = LogOptions.from_environment("error")
    assert (str(options.levels), options.format) == ("debug", "json")
