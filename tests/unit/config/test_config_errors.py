"""Errors: each says path, value, rule, repair and who set it, and all are said at once."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import Field, field_validator

from forge.config import ConfigModel, ForgeConfig, FrozenDict, InvalidConfig, Problem, load
from forge.errors import MISSING, ConfigError


class OptimizerConfig(ConfigModel):
    lr: float = 1e-3
    warmup: int | str = 0


class TaskConfig(ConfigModel):
    weight: int = Field(default=1, ge=1)
    level: int = 0


class TrainConfig(ForgeConfig):
    tasks: Mapping[str, TaskConfig] = Field(default_factory=FrozenDict)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    dataset: str

    @field_validator("dataset")
    @classmethod
    def _check(cls, name: str) -> str:
        if name == "bad":
            raise ValueError("this data set was withdrawn")
        return name


def problems_of(
    schema: type[ConfigModel] = ForgeConfig, *, files: Sequence[str | Path] = (), overrides: Sequence[str] = ()
) -> tuple[Problem, ...]:
    with pytest.raises(InvalidConfig) as caught:
        load(schema, files=files, overrides=overrides)
    assert isinstance(caught.value, ConfigError)
    first = caught.value.problems[0]
    assert (caught.value.path, caught.value.value, caught.value.rule) == (first.path, first.value, first.rule)
    for problem in caught.value.problems:
        assert problem.path
        assert problem.rule
        assert problem.repair
        assert problem.rule in str(caught.value)
        assert problem.repair in str(caught.value)
    return caught.value.problems


def problem_of(*overrides: str, schema: type[ConfigModel] = ForgeConfig) -> Problem:
    (problem,) = problems_of(schema, overrides=overrides)
    return problem


@pytest.mark.parametrize(
    ("override", "path", "rule", "repair"),
    [
        ("run.seed='3'", "run.seed", "a whole number", "write 3, without quotes"),
        ("run.seed=3.0", "run.seed", "a whole number", "write 3"),
        ("run.seed=3.5", "run.seed", "a whole number", "such as 1000"),
        ("run.seed=true", "run.seed", "a whole number", "such as 1000"),
        ("run.seed=007", "run.seed", "a whole number", "such as 1000"),
        ("run.seed=-1", "run.seed", "greater than or equal to 0", "Seed from which"),
        ("run.name=3", "run.name", "must be text", 'put it in quotes: "3"'),
        ("run.name=true", "run.name", "must be text", 'put it in quotes: "true"'),
        ("run.name=[a]", "run.name", "must be text", "write text"),
        ("run.name=a b", "run.name", "letters, digits", "choose such a name"),
        ("run.output_dir=~/x", "run.output_dir", "neither ~ nor variables", "write the path out"),
        ("run.output_dir=${oc.env:HOME}", "run.output_dir", "neither ~ nor variables", "write the path out"),
        ("launcher.kind=slrum", "launcher.kind", "local, hosts, slurm, kubernetes", "did you mean `slurm`?"),
        ("launcher.hosts=tcp://h:1", "launcher.hosts", "must be a list", "launcher.hosts=[…]"),
        ("launcher.hosts=[h:1]", "launcher.hosts.0", "tcp://10.0.0.1:22222", "forge worker"),
        ("launcher.hosts=[tcp://h:0]", "launcher.hosts.0", "from 1 to 65535", "forge worker"),
        ("launcher.hosts=[tcp://h:1, tcp://h:1]", "launcher.hosts", "twice", "remove"),
        ("launcher.kind=hosts", "launcher.hosts", "may not be empty", "forge worker"),
        ("launcher.kind=kubernetes", "launcher.kubernetes.image", "is needed", "an image that you built"),
        ("launcher.slurm.time_limit=2h", "launcher.slurm.time_limit", "SLURM time", "02:00:00"),
        ("launcher.slurm.extra_sbatch=['#SBATCH -n 1']", "launcher.slurm.extra_sbatch.0", "sbatch", "leave out"),
        ("launcher.kubernetes.namespace=A_b", "launcher.kubernetes.namespace", "Kubernetes name", "kubectl"),
        ("launcher.slurm=", "launcher.slurm", "must be a mapping", "remove the line"),
        ("launcher=3", "launcher", "must be a mapping", "launcher.KEY"),
        ("launcher.slurm.exclusive=yes", "launcher.slurm.exclusive", "true or false", "write true or false"),
        ("launcher.kubernetes.labels.X=1", "launcher.kubernetes.labels.X", "must be text", 'quotes: "1"'),
        ("launcher.kubernetes.labels.X='a b'", "launcher.kubernetes.labels.X", "value of a Kubernetes label", "spaces"),
        ("launcher.kubernetes.labels.-x=a", "launcher.kubernetes.labels.-x", "key of a Kubernetes label", "team"),
        ("launcher.kubernetes.claims.A=/runs", "launcher.kubernetes.claims.A", "Kubernetes name", "kubectl"),
        ("launcher.kubernetes.claims.a=runs", "launcher.kubernetes.claims.a", "absolute path", "/runs"),
        ("launcher.kubernetes.claims={a: /r, b: /r}", "launcher.kubernetes.claims", "folder of its own", "elsewhere"),
        ("launcher.heartbeat_s=0", "launcher.heartbeat_s", "greater than 0", "Seconds between"),
        ("launcher.heartbeat_timeout_s=7", "launcher.lease_s", "heartbeat_timeout_s, which is 8", "raise it"),
        ("launcher.lease_s=6", "launcher.lease_s", "more than heartbeat_s + heartbeat_timeout_s", "lower those"),
        ("launcher.lease_s=60", "launcher.attach_timeout_s", "more than lease_s, which is 60", "lower lease_s"),
        ("launcher.slurm.start_timeout_s=.inf", "launcher.slurm.start_timeout_s", "finite", "null"),
        ("launcher.slurm.start_timeout_s=x", "launcher.slurm.start_timeout_s", "a number", "such as 0.5"),
        ("model={num_heads: 3, num_kv_heads: 2}", "model.num_kv_heads", "must divide num_heads", "config.json"),
        ("model.num_experts_per_token=2", "model.num_experts_per_token", "at most num_experts", "lower it"),
        ("model.preset=qwen3_1.7b", "model.preset", "one of the presets", "did you mean `qwen3_1_7b`?"),
        ("model.preset=3", "model.preset", "must be text", 'quotes: "3"'),
        ("model.rope_scaling={factor: 8}", "model.rope_scaling.low_freq_factor", "is required", "VALUE"),
    ],
)
def test_a_bad_value_is_named_with_rule_and_repair(override: str, path: str, rule: str, repair: str) -> None:
    problem = problems_of(overrides=[override])[0]
    assert problem.path == path
    assert rule in problem.rule
    assert repair in problem.repair
    if problem.value is not MISSING:
        assert problem.origin == f"override {override}"


@pytest.mark.parametrize(
    ("key", "repair"),
    [
        ("launcher.bnid", "did you mean `launcher.bind`?"),
        ("launcher.Bind", "did you mean `launcher.bind`?"),
        ("lr", "did you mean `optimizer.lr`?"),
        ("run.lr", "did you mean `optimizer.lr`?"),
        ("weigth", "did you mean `tasks.<name>.weight`?"),
        ("tasks.math.weigth", "did you mean `tasks.math.weight`?"),
        (
            "launcher.slurm.gpus_per_host",
            "did you mean `launcher.slurm.gpus_per_node` or `launcher.kubernetes.gpus_per_host`?",
        ),
        ("run.zzzzzz", "use one of name, output_dir, seed, tags, max_log_mb"),
        ("launcher.hosts_", "did you mean `launcher.hosts`?"),
    ],
)
def test_an_unknown_key_is_met_with_a_suggestion(key: str, repair: str) -> None:
    problem = problem_of(f"{key}=1", "dataset=x", schema=TrainConfig)
    assert (problem.path, problem.value, problem.repair) == (key, 1, repair)
    assert problem.rule.startswith("is not a key of")


def test_all_problems_are_reported_at_once_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("run:\n  sed: 1\n  name: 3\n\ntasks:\n  math: {weight: 0}\n")
    found = problems_of(TrainConfig, files=[file], overrides=["~run.seed", "lr=1", "a..b=1"])
    where = {problem.path: problem.origin for problem in found}
    assert where == {
        "a..b=1": "override a..b=1",
        "run.seed": "override ~run.seed",
        "run.sed": f"{file}:2",
        "run.name": f"{file}:3",
        "tasks.math.weight": f"{file}:6",
        "dataset": None,
        "lr": "override lr=1",
    }
    with pytest.raises(InvalidConfig, match="has 7 problems"):
        load(TrainConfig, files=[file], overrides=["~run.seed", "lr=1", "a..b=1"])


def test_a_file_that_cannot_be_read_hides_no_other_problem_and_makes_none_up(tmp_path: Path) -> None:
    overrides = ["run.seed=x", "~run.name"]
    found = problems_of(TrainConfig, files=[tmp_path / "no.yaml"], overrides=overrides)
    assert [problem.path for problem in found] == [str(tmp_path / "no.yaml"), "run.seed"]


def test_the_branches_of_a_union_make_one_problem() -> None:
    problem = problem_of("optimizer.warmup=[1]", "dataset=x", schema=TrainConfig)
    assert (problem.path, problem.rule) == ("optimizer.warmup", "must be a whole number, or must be text")


def test_a_validators_own_words_are_kept() -> None:
    assert problem_of("dataset=bad", schema=TrainConfig).rule == "this data set was withdrawn"


@pytest.mark.parametrize(
    ("text", "rule", "position"),
    [
        ("run: [1, 2\nlauncher: 3\n", "must be valid YAML", ":2:9"),
        ("run:\n\tseed: 1\n", "must be valid YAML", ":2:1"),
        ("a: 1\n---\nb: 2\n", "must be valid YAML", ":2:1"),
        ("- 1\n- 2\n", "must be a mapping", ":1"),
        ("just text\n", "must be a mapping", ":1"),
        ("run: {seed: 1}\nrun: {name: x}\n", "only once in a mapping; it is already on line 1", ":2"),
        ("run:\n  seed: 1\n  seed: 1\n", "only once in a mapping; it is already on line 2", ":3"),
        ("run: &a {seed: 1}\nmodel: {<<: *a}\n", "merge keys", ":2"),
        ("run: {seed: !!python/object:os.system x}\n", "tag", ":1"),
        ("run: {[a, b]: 1}\n", "a key must be plain text", ":1"),
        ("run: &a {name: *a}\n", "may not contain itself", ":1"),
        ('run: {name: "\\ud800"}\n', "valid Unicode", ":1"),
        ("run: {seed: " + "9" * 5000 + "}\n", "not a number that can be read", ":1"),
    ],
)
def test_bad_yaml_is_placed(tmp_path: Path, text: str, rule: str, position: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    problem = problems_of(files=[file])[0]
    assert rule in problem.rule
    assert problem.origin == f"{file}{position}"


def test_aliases_cannot_blow_up(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (tmp_path / "a.yaml").write_text("\n".join(lines))
    (problem,) = problems_of(files=[tmp_path / "a.yaml"])
    assert "100000 values" in problem.rule


def test_files_that_are_not_there_not_files_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("")
    (tmp_path / "binary.yaml").write_bytes(b"run: \xff")
    missing, folder, binary = problems_of(files=[tmp_path / "bse.yaml", tmp_path, tmp_path / "binary.yaml"])
    assert (missing.path, missing.rule) == (str(tmp_path / "bse.yaml"), "the file must exist")
    assert missing.repair == f"did you mean `{tmp_path / 'base.yaml'}`?"
    assert "directory" in folder.rule
    assert "UTF-8" in binary.rule


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\ufeffrun: {}\n"])
def test_a_file_may_be_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert load(ForgeConfig, files=[tmp_path / "a.yaml"]) == ForgeConfig()


@pytest.mark.parametrize("name", ["files", "overrides"])
def test_one_text_is_not_a_sequence(name: str) -> None:
    arguments: Mapping[str, str] = {name: "run.seed=1"}
    with pytest.raises(ConfigError) as caught:
        load(ForgeConfig, **arguments)  # type: ignore[arg-type]
    assert (caught.value.path, caught.value.repair) == (name, f"write {name}=['run.seed=1']")


def test_the_error_travels_between_processes() -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(ForgeConfig, overrides=["run.seed=x", "~model"])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.problems, copy.path) == (str(caught.value), caught.value.problems, caught.value.path)
    assert copy.problems[0].value is MISSING
