"""What the first line of every program costs: the modules that it loads, counted in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "monarch", "pydantic", "pydantic_core", "numpy", "vllm", "torchtitan", "transformers", "cloudpickle"}

REPORT = """
import json, sys
before = set(sys.modules)
{work}
print("MODULES", json.dumps(sorted(set(sys.modules) - before)))
"""
HELP = """
from forge.cli import main
try:
    main({words})
except SystemExit as ended:
    assert not ended.code
"""


def modules_after(work: str) -> list[str]:
    """The modules that `work` loads on top of a bare interpreter."""
    ran = subprocess.run(
        [sys.executable, "-c", REPORT.format(work=work)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    last = ran.stdout.splitlines()[-1]
    loaded: list[str] = json.loads(last.removeprefix("MODULES "))
    return loaded


def packages(loaded: list[str]) -> set[str]:
    return {name.partition(".")[0] for name in loaded}


def test_the_count_would_notice() -> None:
    assert {"pydantic", "pydantic_core"} <= packages(modules_after("import pydantic"))


def test_importing_the_library_loads_next_to_nothing() -> None:
    loaded = modules_after("import forge")
    assert not packages(loaded) & (HEAVY | {"yaml", "asyncio", "argparse"})
    assert [name for name in loaded if name.startswith("forge.")] == ["forge._amx", "forge._lazy"]
    assert len(loaded) < 20


def test_looking_at_the_public_names_loads_nothing_either() -> None:
    loaded = modules_after("import forge; assert 'ForgeActor' in dir(forge); forge.__version__")
    assert not packages(loaded) & HEAVY


def test_a_public_name_loads_monarch_but_not_torch() -> None:
    loaded = packages(modules_after("from forge import ForgeActor, endpoint, run"))
    assert "monarch" in loaded
    assert "torch" not in loaded


def test_an_unknown_name_is_an_attribute_error() -> None:
    import forge

    with pytest.raises(AttributeError, match="module 'forge' has no attribute 'Actr'"):
        forge.Actr  # noqa: B018


def test_every_public_name_can_be_had() -> None:
    import forge

    assert set(forge.__all__) <= set(dir(forge))
    assert all(getattr(forge, name) is not None for name in forge.__all__)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], *([command, "--help"] for command in ("run", "chat", "serve", "doctor", "worker"))],
)
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    loaded = modules_after(HELP.format(words=words))
    assert not packages(loaded) & (HEAVY | {"yaml", "asyncio", "huggingface_hub", "tqdm"})


def test_a_rank_process_starts_light() -> None:
    assert not packages(modules_after("import forge.runtime.rank_main")) & HEAVY


def test_records_and_figures_load_no_torch() -> None:
    names = "Task, Completion, Episode, Group, Score, Reduce, record_metric"
    assert not packages(modules_after(f"from forge import {names}")) & {"torch", "monarch", "transformers"}


def test_every_public_name_is_there_and_costs_no_torch() -> None:
    names = "Trainer Generator ReferenceModel RewardActor ReplayBuffer record_metric Reduce Task Completion Episode"
    work = f"import forge; assert set({names.split()}) <= set(forge.__all__)\nfor n in forge.__all__: getattr(forge, n)"
    assert "torch" not in packages(modules_after(work))
