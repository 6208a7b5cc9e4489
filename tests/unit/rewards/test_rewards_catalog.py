"""Rewards by name: finding them, refusing what cannot run, composing, and the command `forge rewards`."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import InvalidConfig, RewardConfig, RewardsConfig
from forge.errors import ConfigError
from forge.rewards import (
    all_of,
    any_of,
    arguments,
    bound,
    check,
    check_args,
    find,
    gated,
    is_served,
    names,
    number,
    product_of,
    rescaled,
    tags,
)
from scored_texts import asked, said

MODULE = """
from __future__ import annotations
from typing import TYPE_CHECKING
from functools import partial
if TYPE_CHECKING:
    from somewhere import Unknown

def plain(prompt, completion, *, bonus: float = 0.0, style: str = "x"):
    return len(completion.text) + bonus

def open_ended(prompt, completion, **anything):
    return 1.0

def untyped(prompt, completion, thing: Unknown = None):
    return 1.0

def demanding(prompt, completion, *, key: int):
    return float(key)

async def later(prompt, completion):
    return 1.0

def several(prompt, completion):
    yield 1.0

def lonely(prompt):
    return 1.0

class Judge:
    def __call__(self, prompt, completion, *, mark: int = 1):
        return float(mark)

class Group:
    @staticmethod
    def method(prompt, completion):
        return 2.0

judge = Judge()
halved = partial(plain, bonus=0.5)
constant = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's module beside the script, and some that do not import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "own_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    (tmp_path / "misspelt_rewards.py").write_text("x = 1\ndef f(prompt, completion)\n")
    (tmp_path / "lacking_rewards.py").write_text("import no_such_package\n")
    for name in ("own_rewards", "broken_rewards", "lacking_rewards"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def config(*functions: dict[str, Any], **sections: Any) -> RewardsConfig:
    return RewardsConfig(functions=tuple(RewardConfig(**function) for function in functions), **sections)


def problem(*functions: dict[str, Any], **sections: Any) -> Any:
    """The one thing that is wrong."""
    with pytest.raises(ConfigError) as caught:
        check(config(*functions, **sections))
    (found,) = caught.value.problems  # type: ignore[attr-defined]
    assert found.rule
    assert found.repair
    return found


def test_every_built_in_is_there_and_says_what_it_does() -> None:
    assert names() == sorted(names())
    for name in ("code", "countdown", "exact", "judge", "math", "number", "reasoning_gym", "reward_model", "tags"):
        assert name in names()
    for name in names():
        assert isinstance(arguments(name), dict)
        assert "prompt" not in arguments(name)
        if not is_served(name):
            assert (find(name).__doc__ or "").strip()
    assert find("number") is number


def test_served_rewards_are_no_functions() -> None:
    assert is_served("judge")
    assert not is_served("number")
    for kind in ("judge", "reward_model"):
        with pytest.raises(ConfigError, match="behind a service") as caught:
            find(kind)
        assert caught.value.value == kind


def test_a_module_that_another_one_hides_is_named(own_module: Path) -> None:
    (own_module / "json.py").write_text(
        "def f(prompt, completion):\n    return 1.0\n"
    )  # Python's own is loaded already
    with pytest.raises(ConfigError) as caught:
        find("json:f")
    assert caught.value.repair == f"rename {own_module}/json.py: json is found elsewhere first"


NOT_FOUND = (
    "put it beside the script, beside the configuration, in the working directory or on PYTHONPATH, or install it"
)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("numbr", "did you mean `number`?"),
        ("Exact", "did you mean `exact`?"),
        ("zzz", "`forge rewards` lists the built-in ones"),
        ("own_rewards:plane", "did you mean `plain`?"),
        ("own_rewards:", "check the name behind the colon"),
        ("own_rewards:later", "write `def` instead of `async def`"),
        ("own_rewards:several", "return one number"),
        ("own_rewards:lonely", "write it as a function"),
        ("own_rewards:constant", f"write a reward, or name one of {', '.join(names())}"),
        ("no_such_module:f", NOT_FOUND),
        (
            "lacking_rewards:f",
            "the module was found, but not no_such_package, which it imports: install it, or put it beside the module",
        ),
        ("broken_rewards:f", "correct the module; the error comes from {folder}/broken_rewards.py, line 1"),
        ("misspelt_rewards:f", "correct {folder}/misspelt_rewards.py, line 2"),
        ("own_rewards.py:plain", "write own_rewards, the module's name, not its file"),
        ("./own_rewards:plain", "write the module's dotted name, not its file"),
        (":plain", "write the module's dotted name, not its file"),
    ],
)
def test_what_cannot_be_found_is_refused_with_a_repair(kind: str, says: str, own_module: Path) -> None:
    says = says.format(folder=own_module)
    with pytest.raises(ConfigError) as caught:
        find(kind)
    assert (caught.value.path, caught.value.value, caught.value.repair) == ("kind", kind, says)
    assert caught.value.rule
    if ":" not in kind:  # the schema refuses it
        return
    found = problem({"kind": "number"}, {"kind": kind, "name": "mine"})
    assert (found.path, found.value, found.repair) == ("rewards.functions[1].kind", kind, says)


@pytest.mark.parametrize(
    ("kind", "args", "score"),
    [
        ("plain", {"bonus": 1}, 3),
        ("open_ended", {"a": 1}, 1),
        ("untyped", {"thing": 1}, 1),
        ("judge", {"mark": 2}, 2),
        ("Group.method", {}, 2),
        ("halved", {}, 2.5),
    ],
)
def test_rewards_of_a_users_module(kind: str, args: dict[str, Any], score: float) -> None:
    kind = f"own_rewards:{kind}"
    check(config({"kind": kind, "args": args}))
    assert find(kind)(asked(), said("ab"), **args) == score


@pytest.mark.parametrize(
    ("kind", "args", "path", "says"),
    [
        ("number", {"tolerence": 1}, "tolerence", ["take, within, tolerance, percent_as_fraction", "`tolerance`?"]),
        ("number", {"zzz": 1}, "zzz", ["remove it"]),
        ("number", {"prompt": 1}, "prompt", ["the arguments are"]),
        ("number", {"tolerance": "much"}, "tolerance", ["valid number"]),
        ("number", {"tolerance": -1}, "tolerance", ["greater than or equal to 0"]),
        ("number", {"percent_as_fraction": 1}, "percent_as_fraction", ["valid boolean"]),
        ("number", {"take": "first"}, "take", ["'auto', 'boxed'"]),
        ("number", {"within": "<answer>"}, "within", ["without < and >"]),
        ("answer_in_tags", {"tag": "an answer"}, "tag", ["without < and >"]),
        ("answer_in_tags", {"form_credit": 2}, "form_credit", ["less than or equal to 1"]),
        ("exact", {"ignore": ["spaces"]}, "ignore", ["'case', 'space'"]),
        ("exact", {"ignore": "case"}, "ignore", ["'str' instances are not allowed as a Sequence"]),
        ("contains", {"phrases": []}, "phrases", ["at least 1 item"]),
        ("contains", {"phrases": [""]}, "phrases", ["at least 1 character"]),
        ("regex", {}, "pattern", ["needs this argument"]),
        ("regex", {"pattern": "("}, "pattern", ["must be a regular expression", "single quotes"]),
        ("regex", {"pattern": "(a)", "group": 2}, "group", ["one of 0, 1"]),
        ("regex", {"pattern": "(?P<a>x)", "group": "b"}, "group", ["one of 0, 1, a"]),
        ("tags", {"tags": []}, "tags", ["at least 1 item"]),
        ("tags", {"tags": ["<a>"]}, "tags", ["without < and >"]),
        ("tags", {"tags": ["a", "a"]}, "tags", ["each tag may appear once"]),
        ("length", {}, "target", ["needs min_tokens, max_tokens or target"]),
        ("length", {"target": 3, "max_tokens": 4}, "target", ["with min_tokens and max_tokens"]),
        ("length", {"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["at most max_tokens, which is 4"]),
        ("length", {"max_tokens": -1}, "max_tokens", ["greater than or equal to 0"]),
        ("length", {"max_tokens": 1.5}, "max_tokens", ["valid integer"]),
        ("countdown", {"use": "twice"}, "use", ["'exactly_once' or 'at_most_once'"]),
        ("own_rewards:plain", {"bonus": "x"}, "bonus", ["valid number"]),
        ("own_rewards:plain", {"bonu": 1}, "bonu", ["bonus, style", "did you mean `bonus`?"]),
        ("own_rewards:demanding", {}, "key", ["needs this argument"]),
        ("own_rewards:judge", {"mark": "x"}, "mark", ["valid integer"]),
        ("own_rewards:halved", {"bonus": "x"}, "bonus", ["valid number"]),
        ("own_rewards:Group.method", {"a": 1}, "a", ["the reward takes no arguments"]),
    ],
)
def test_wrong_arguments_are_named(kind: str, args: dict[str, Any], path: str, says: list[str]) -> None:
    found = problem({"kind": kind, "args": args})
    assert found.path == f"rewards.functions[0].args.{path}"
    if path in args:
        assert found.value in (args[path], tuple(args[path]) if isinstance(args[path], list) else args[path], "<a>")
    for words in says:
        assert words in f"{found.rule} | {found.repair}"


def test_served_rewards_need_their_section() -> None:
    for kind in ("judge", "reward_model"):
        found = problem({"kind": kind})
        assert found.path == f"rewards.{kind}"
        assert "rewards.functions[0]" in found.rule
        check(config({"kind": kind}, **{kind: {"path": "model"}}))
    judged = {"judge": {"path": "model"}}
    assert problem({"kind": "judge", "args": {"scale": 0}}, **judged).path == "rewards.functions[0].args.scale"
    template = {"kind": "judge", "args": {"template": "no place"}}
    assert problem(template, **judged).path == "rewards.functions[0].args.template"
    model = {"kind": "reward_model", "args": {"squash": "tanh"}}
    assert problem(model, reward_model={"path": "model"}).path == "rewards.functions[0].args.squash"


def test_the_name_of_the_overlong_part_is_taken() -> None:
    reward = {"kind": "number", "name": "overlong"}
    found = problem(reward, overlong={"max_tokens": 9, "buffer": 2})
    assert (found.path, found.value) == ("rewards.functions[0].name", "overlong")
    check(config(reward))


def test_all_faults_are_told_at_once_and_none_is_none() -> None:
    assert problem().path == "rewards.functions"
    with pytest.raises(InvalidConfig) as caught:
        check(config({"kind": "own_rewards:numbr"}, {"kind": "exact", "args": {"a": 1, "take": 2}}, {"kind": "judge"}))
    assert [found.path for found in caught.value.problems] == [
        "rewards.functions[0].kind",
        "rewards.functions[1].args.a",
        "rewards.functions[1].args.take",
        "rewards.judge",
    ]
    check(
        config(
            {"kind": "number", "args": {"tolerance": 1, "within": "answer"}},
            {"kind": "exact", "args": {"ignore": ["case", "space"]}},
            {"kind": "length", "args": {"max_tokens": 5}},
            {"kind": "regex", "args": {"pattern": "a+", "group": 0}},
            {"kind": "tags", "args": {"tags": ["a", "b"]}},
            {"kind": "contains", "args": {"phrases": ["x"]}},
        )
    )
    check_args("number", {"take": "last"})
    with pytest.raises(ConfigError) as refused:
        check_args("number", {"take": "lst"})
    assert refused.value.path == "args.take"


def test_composition() -> None:
    prompt = asked("18")
    inside = bound(number, within="answer")
    good, loose, wrong = (
        "<think>a</think><answer>18</answer>",
        "<answer>18</answer>",
        "<think>a</think><answer>1</answer>",
    )
    scores = {
        "all": [all_of(inside, tags)(prompt, said(text)) for text in (good, loose, wrong)],
        "any": [any_of(inside, tags)(prompt, said(text)) for text in (good, loose, wrong, "")],
        "product": [product_of(inside, bound(tags, partial=True))(prompt, said(text)) for text in (good, loose, wrong)],
        "gated": [gated(inside, by=tags, otherwise=-1.0)(prompt, said(text)) for text in (good, loose, wrong)],
        "rescaled": [rescaled(inside, low=-1, high=1)(prompt, said(text)) for text in (good, wrong)],
    }
    assert scores == {
        "all": [1, 0, 0],
        "any": [1, 1, 1, 0],
        "product": [1, 2 / 8, 0],
        "gated": [1, -1, 0],
        "rescaled": [1, -1],
    }
    for compose in (all_of, any_of, product_of):
        with pytest.raises(TypeError, match="at least one reward"):
            compose()


def test_a_closed_gate_spares_the_reward() -> None:
    def costly(prompt: object, completion: object) -> float:
        raise AssertionError("it ran")

    assert gated(costly, by=tags)(asked(), said("no tags")) == 0


def test_importing_and_scoring_loads_nothing_heavy() -> None:
    program = (
        "import json, sys, forge.rewards as r\n"
        "from forge.types import Completion, Task\n"
        "for kind, args in json.loads(sys.argv[1]):\n"
        "    r.find(kind)(Task('a', answer='1'), Completion((), (1,), (0.0,), None, '1', 'stop'), **args)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    kinds = [["number", {}], ["exact", {}], ["fuzzy", {}], ["contains", {}], ["tags", {}], ["length", {"target": 1}]]
    ran = subprocess.run(
        [sys.executable, "-c", program, json.dumps(kinds)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert not set(json.loads(ran.stdout)) & {"torch", "pydantic", "numpy", "sympy", "monarch", "reasoning_gym", "yaml"}


def tried(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["rewards", *words])
    told = capsys.readouterr()
    return code, told.out if code == 0 else told.err


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = tried(capsys)
    assert code == 0
    for name in names():
        assert f"\n{name}(" in f"\n{text}"
    assert 'number(take="auto", within=null, tolerance=0.0, percent_as_fraction=false)' in text
    assert "regex(pattern, whole=false" in text


@pytest.mark.parametrize(
    ("words", "score"),
    [
        (["number", "--answer", "18", "--text", "It is 18 dollars."], "1"),
        (["number", "--answer", "18", "--text", "18.05", "tolerance=0.1"], "1"),
        (["number", "tolerance=0.1", "--answer", "18", "take=last", "--text", "18.2"], "0"),
        (["exact", "ignore=[case]", "--answer", "Paris", "--text", "paris"], "1"),
        (["length", "target=4", "--text", "one two three four"], "1"),
        (["length", "target=9", "margin=2", "--text", "x", "--num-tokens", "8"], "0.5"),
        (["countdown", "--text", "1+2", "--metadata", '{"numbers": [1, 2], "target": 3}'], "1"),
        (["own_rewards:plain", "--text", "abc"], "3"),
    ],
)
def test_the_command_scores_a_text(capsys: pytest.CaptureFixture[str], words: list[str], score: str) -> None:
    assert tried(capsys, "try", *words) == (0, f"{score}\n")


def test_the_command_reads_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("so\n18\n"))
    assert tried(capsys, "try", "number", "--answer", "18", "--text", "-") == (0, "1\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["numbr", "--text", "x"], "did you mean `number`?"),
        (["judge", "--text", "x"], "it is computed by a model behind a service"),
        (["number", "--text", "x"], "the prompt must have an answer"),
        (["number", "--text", "x", "tolerence=1"], "did you mean `tolerance`?"),
        (["number", "--text", "x", "tolerance"], "must be NAME=VALUE"),
        (["number", "--text", "x", "tolerance=["], "the value must be YAML"),
        (["countdown", "--text", "x", "--metadata", "{"], "must be a JSON object"),
        (["countdown", "--text", "x", "--metadata", "[1]"], "must be a JSON object"),
    ],
)
def test_the_command_refuses(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    code, text = tried(capsys, "try", *words)
    assert code == 2
    assert says in text


def test_reasoning_gym_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    found = problem({"kind": "reasoning_gym"})
    assert (found.path, found.value) == ("rewards.functions[0].kind", "reasoning_gym")
    assert found.repair == "pip install 'torchforge[reasoning-gym]'"
