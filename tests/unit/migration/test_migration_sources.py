"""How files of other projects are read: shell scripts, Python sources, values as text. Nothing of them is run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.config import InvalidConfig
from forge.errors import ConfigError
from forge.migration import Computed, Options, convert_file
from forge.migration.python_source import Call, parse_python, scope_of, value_of
from forge.migration.reading import coerce, form_of
from forge.migration.shell_words import commands
from migrations import converted, ours, todo_of


def words(script: str) -> list[list[str]]:
    return [[word.text for word in each] for each in commands(script)]


# ---- Shell -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        ("run a b  c", [["run", "a", "b", "c"]]),
        ("run a \\\n  b # not c", [["run", "a", "b"]]),
        ("run 'a b' \"c d\" e'f'\"g\"", [["run", "a b", "c d", "efg"]]),
        ("one; two && three | four", [["one"], ["two"], ["three"], ["four"]]),
        ("X=1\nrun $X ${X}0 '$X' \"$X\"", [["run", "1", "10", "$X", "1"]]),
        ("export X='a b'\nrun x=$X", [["run", "x=a b"]]),
        ("X=${1:-7}\nrun $X", [["run", "7"]]),
        ("run ${GONE:-5} ${GONE-6}", [["run", "5", "6"]]),
        ("N=4\nM=$((N * 1024 + 1))\nrun $M $((M / N))", [["run", "4097", "1024"]]),
        ("A=(x=1 # first\n   'y=2 3'\n)\nA+=(z=4)\nrun \"${A[@]}\" end", [["run", "x=1", "y=2 3", "z=4", "end"]]),
        ("run a > log 2>&1 b 2>err >>more", [["run", "a", "b"]]),
        ('run l=\'["a","b"]\'', [["run", 'l=["a","b"]']]),
        ("X=a\nX+=b\nrun $X", [["run", "ab"]]),
        ('run "a \\"b\\" \\$X"', [["run", 'a "b" $X']]),
        ("", []),
        ("# nothing\nX=1", []),
        ("run 'never closed", [["run", "never closed"]]),
        ("ALL='a=1 b=2'\nrun $ALL \"$ALL\"", [["run", "a=1", "b=2", "a=1 b=2"]]),
        ('MORE=(b)\nALL=(a\n  "${MORE[@]}"\n  c)\nrun "${ALL[@]}"', [["run", "a", "b", "c"]]),
        ('E=()\nrun "${E[@]}" a', [["run", "a"]]),
        ("for v in $(env | sed 's/(x)/y/'); do\n  unset $v\ndone\nrun", [["unset", "$v"], ["run"]]),
        ("if [ $N -eq 4 ]; then X=1; fi\nrun a", [["[", "$N", "-eq", "4", "]"], ["run", "a"]]),
        ("TOKEN=1 run a", [["run", "a"]]),
    ],
)
def test_a_script_is_cut_into_words(script: str, wanted: list[list[str]]) -> None:
    assert words(script) == wanted


@pytest.mark.parametrize("word", ["$(nproc)", "`date`", "$HOME/x", "${HOME}/x", "$((GONE + 1))", "$((2 ** 9))"])
def test_what_only_the_shell_knows_stays_as_it_is_written(word: str) -> None:
    ((_, found),) = commands(f"run {word}")
    assert (found.text, found.is_computed) == (word, True)


@pytest.mark.parametrize(
    "script",
    [
        "if [ $1 -eq 4 ]; then\n  N=1024\nelse\n  N=384\nfi\nrun $N",
        "N=1\nfor i in 1 2; do\n  N=2\ndone\nrun $N",
        "while true; do N=2; done\nrun $N",
    ],
)
def test_a_variable_that_a_branch_or_a_loop_sets_is_not_known(script: str) -> None:
    ((_, found),) = [each for each in commands(script) if each[0].text == "run"]
    assert found.is_computed


def test_words_know_their_lines() -> None:
    ((first, second, third),) = commands("# a comment\nrun \\\n  a \\\n  b")
    assert (first.line, second.line, third.line) == (2, 3, 4)


@given(st.text(alphabet="ab=$(){}[]'\"\\`#;&|<> \n\t0:-+@*", max_size=60))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_text_is_read_as_a_script(text: str) -> None:
    for each in commands(text):
        assert all(1 <= word.line <= text.count("\n") + 1 for word in each)


# ---- Python ----------------------------------------------------------------------------------------------------------


def evaluated(source: str, name: str = "x") -> object:
    tree = parse_python(source, where="train.py")
    scope = scope_of(tree.body)
    return value_of(ast.Name(name), scope)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("x = -1.5e-6", -1.5e-6),
        ("x = [1, 'a', None, True]", [1, "a", None, True]),
        ("x = {'a': (1, 2)}", {"a": [1, 2]}),
        ("n = 4\nx = n * 2 + 1", 9),
        ("m = 'Qwen'\nx = f'runs/{m}'", "runs/Qwen"),
        ("x = 10 // 4", 2),
        ("x: int = 3", 3),
        ("base = {'a': 1}\nx = {**base, 'b': 2}", {"a": 1, "b": 2}),
    ],
)
def test_literals_and_names_have_values(source: str, wanted: object) -> None:
    assert evaluated(source) == wanted


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = len(data) // 4", "len(data) // 4"),
        ("x = args.lr", "args.lr"),
        ("x = a if b else c", "a if b else c"),
        ("x = 'a' * 10**9", "'a' * 10 ** 9"),
        ("x = 1 / 0", "1 / 0"),
        ("x = f'{n:.2f}'", "f'{n:.2f}'"),
        ("x = unknown", "unknown"),
        ("x = 1\nx = 2", "x, which is assigned twice"),
        ("import torch\nx = torch.bfloat16", "torch.bfloat16"),
    ],
)
def test_everything_else_is_computed_when_the_script_runs(source: str, text: str) -> None:
    assert evaluated(source) == Computed(text)


def test_a_name_that_stands_for_itself_does_not_loop() -> None:
    assert isinstance(evaluated("x = [x]"), list)
    assert isinstance(evaluated("x = y\ny = x"), Computed)


def test_a_call_keeps_its_arguments_and_their_lines() -> None:
    found = evaluated("extra = dict(c=3)\nx = trl.GRPOConfig(\n  'out',\n  a=1,\n  **{'b': 2},\n  **extra,\n  **gone)")
    assert isinstance(found, Call)
    assert (found.name, found.last_name, found.args) == ("trl.GRPOConfig", "GRPOConfig", ("out",))
    assert found.kwargs == {"a": 1, "b": 2, "c": 3, "**gone": Computed("gone")}
    assert found.lines["a"] == 4


def test_a_script_is_never_run(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    script = f"""#!/usr/bin/env python
        open({str(evidence)!r}, "w")
        from trl import GRPOConfig
        config = GRPOConfig(output_dir="out", num_generations=4)
    """
    converted("trl", "\n".join(line.strip() for line in script.splitlines()), tmp_path)
    assert not evidence.exists()


TRAIN = """#!/usr/bin/env python
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

RATE = 2e-6


def short(completions, **kwargs):
    return [float(len(each) < 10) for each in completions]


def main(args):
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    dataset = dataset.map(lambda row: {"prompt": row["question"]})
    lora = LoraConfig(r=4, target_modules=["q_proj"], bias="none")
    config = GRPOConfig(
        "runs/gsm8k",
        learning_rate=RATE,
        per_device_train_batch_size=2 * 4,
        max_steps=len(dataset),
        beta=args.beta,
    )
    config.num_generations = 4
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B",
        reward_funcs=[short, "owner/judge"],
        args=config,
        train_dataset=dataset,
        peft_config=lora,
        environment_factory=None,
    )
    trainer.train()
"""


def test_a_script_gives_what_its_calls_say(tmp_path: Path) -> None:
    found = converted("trl", TRAIN, tmp_path, num_processes=1)
    assert ours(found, "training.learning_rate") == 2e-6
    assert ours(found, "rollout.batch_groups") == 2, "8 samples in groups of 4, which is set after the call"
    assert ours(found, "model.hf_repo") == "Qwen/Qwen3-0.6B"
    assert ours(found, "adapter") == {"rank": 4, "alpha": 8.0, "targets": ["q_proj"]}, "with PEFT's own defaults"
    assert ours(found, "prompts.sources") == [{"hf_dataset": "openai/gsm8k", "hf_config": "main"}]
    assert [each["kind"] for each in ours(found, "rewards.functions")] == ["my_rewards:short", "reward_model"]
    assert (ours(found, "run.output_dir"), ours(found, "run.name")) == ("runs", "gsm8k")


def test_what_a_script_computes_is_asked_for_with_its_line(tmp_path: Path) -> None:
    todo = todo_of(converted("trl", TRAIN, tmp_path))
    assert "`len(dataset)`" in todo["training.max_steps"]
    assert "train.py:21" in todo["training.max_steps"]
    assert "`args.beta`" in todo["algorithm.kl.coefficient"]


def test_arguments_without_a_key_are_reported(tmp_path: Path) -> None:
    found = converted("trl", TRAIN, tmp_path)
    lost = {key for row in found.none for key in row.theirs}
    assert {"peft_config.bias", "trainer.environment_factory"} <= lost


def test_a_trainer_without_a_configuration_has_its_defaults(tmp_path: Path) -> None:
    script = (
        "#!/usr/bin/env python\nfrom trl import SFTTrainer\nSFTTrainer(model='models/m', train_dataset=data).train()\n"
    )
    found = converted("trl", script, tmp_path)
    assert found.schema.__name__ == "SFTConfig"
    assert ours(found, "training.learning_rate") == 2e-5


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("print('hello')", "one call of GRPOConfig"),
        ("c = ORPOConfig(beta=0.1)", "one of GRPOConfig"),
        ("a = GRPOConfig()\nb = SFTConfig()", "one call of GRPOConfig"),
        ("t = GRPOTrainer(model='m', args=parser.parse())", "one call of GRPOConfig"),
    ],
)
def test_a_script_without_one_configuration_is_refused(body: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        converted("trl", f"#!/usr/bin/env python\n{body}\n", tmp_path)
    assert str(refused.value.rule).startswith(rule)
    assert str(refused.value.path).startswith(str(tmp_path / "train.py"))
    assert refused.value.repair


def test_a_kind_chooses_one_of_several_configurations(tmp_path: Path) -> None:
    script = "#!/usr/bin/env python\na = GRPOConfig(num_generations=4)\nb = SFTConfig(packing=True)\n"
    assert converted("trl", script, tmp_path, kind="sft").schema.__name__ == "SFTConfig"


# ---- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "form"),
    [
        ("a.yaml", "", "yaml"),
        ("a.json", "", "yaml"),
        ("a.py", "", "python"),
        ("a.sh", "", "shell"),
        ("a.toml", "", "toml"),
        ("a", "#!/bin/bash\n", "shell"),
        ("a", "#!/usr/bin/env python3\n", "python"),
        ("a", "beta: 1\n", "yaml"),
    ],
)
def test_a_file_is_read_as_what_its_name_or_its_first_line_says(name: str, text: str, form: str) -> None:
    assert form_of(Path(name), text) == form


@pytest.mark.parametrize(
    ("value", "default", "wanted"),
    [
        ("1e-6", 0.5, 1e-6),
        ("yes", False, True),
        ("off", True, False),
        ("4", 1, 4),
        (1, 0.5, 1.0),
        ("text", 0.5, "text"),
        ("4", None, "4"),
        (True, 1, True),
    ],
)
def test_values_are_read_as_the_kind_of_their_default(value: object, default: object, wanted: object) -> None:
    found = coerce(value, default)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("bad.yaml", "a: [1", "must be valid YAML"),
        ("bad.toml", "a = [", "must be valid TOML"),
        ("bad.py", "def f(:", "a .py file holds Python"),
        ("list.yaml", "- a\n- b\n", "a mapping of keys to values"),
        ("empty.yaml", "", "a mapping of keys to values"),
        ("other.sh", "echo hello\n", "a command such as"),
        ("ours.yaml", "run: {name: mine}\nrollout: {batch_groups: 4}\n", "at least one key of TRL 1.16.0"),
        ("binary.yaml", b"\xff\xfe\x00", "text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(name: str, content: str | bytes, rule: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refused:
        convert_file("trl", path)
    assert str(refused.value.rule).startswith(rule)
    assert str(refused.value.path).startswith(str(path))
    assert refused.value.repair


@pytest.mark.parametrize(("name", "rule"), [("gone.yaml", "the file must exist"), (".", "a file; this is a directory")])
def test_a_file_that_is_not_there_is_refused(name: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        convert_file("trl", tmp_path / name)
    assert refused.value.rule == rule


def test_a_name_that_is_nearly_right_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("beta: 0.1\n")
    with pytest.raises(ConfigError, match=r"grpo\.yaml"):
        convert_file("trl", tmp_path / "grpoo.yaml")


def test_a_kind_that_the_project_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        convert_file("trl", tmp_path / "a.yaml", Options(kind="ppo"))
    assert refused.value.path == "--kind"
    assert "grpo, rloo, sft, dpo, kto, reward" in str(refused.value.rule)


@pytest.mark.parametrize(
    ("project", "text", "other"),
    [
        ("verl", "num_train_epochs: 2\nmodel_name_or_path: a/b\n", "trl"),
        ("titanrl", "actor_rollout_ref: {rollout: {n: 4}}\n", "verl"),
        ("trl", "async_loop: {num_training_steps: 4}\n", "titanrl"),
    ],
)
def test_a_configuration_of_another_project_is_recognised(project: str, text: str, other: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        converted(project, text, tmp_path)
    assert refused.value.repair == f"use `forge import {other}`"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="only once"):
        converted("trl", "beta: 0.1\nbeta: 0.2\n", tmp_path)


def test_a_command_line_of_trl_reads_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("num_generations: 8\nbeta: 0.1\nlearning_rate: 1e-5\n")
    script = """#!/bin/bash
        accelerate launch --num_processes 4 --config_file zero3.yaml \\
            trl/scripts/grpo.py --config base.yaml --beta 0.2 --bf16 --reward_funcs accuracy_reward a.b
    """
    found = converted("trl", script, tmp_path)
    assert ours(found, "algorithm.kl.coefficient") == 0.2, "the command line wins"
    assert ours(found, "training.learning_rate") == 1e-5
    assert ours(found, "distributed.shard") == 4
    assert [each["kind"] for each in ours(found, "rewards.functions")] == ["math", "a:b"]
