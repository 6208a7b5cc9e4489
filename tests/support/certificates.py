"""Certificates for the channel between hosts, made with the commands of docs/guides/security.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"


def recipe(name: str) -> str:
    """Return the commands under `# recipe: name` of the guide."""
    found = re.findall(rf"```bash\n# recipe: {name}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 1, f"the guide has one recipe `{name}`"
    return str(found[0])


def make_certificates(folder: Path, names: Mapping[str, str]) -> None:
    """Create a CA and a certificate for each entry: its file, and the names or addresses in it (`IP:10.0.0.7`)."""
    if shutil.which("openssl") is None:
        pytest.skip("the recipe needs openssl")
    calls = [f"certificate {name} {alternatives}" for name, alternatives in names.items()]
    script = "\n".join(["set -e", recipe("ca"), recipe("certificate"), *calls])
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"{name}.crt: OK" in done.stdout
        assert (folder / f"{name}.key").stat().st_mode & 0o077 == 0


def tls_variables(folder: Path, name: str) -> dict[str, str]:
    """Return the variables with which a process uses a certificate of `make_certificates`."""
    files = {"CERT": f"{name}.crt", "KEY": f"{name}.key", "CA": "ca.crt"}
    return {f"HYPERACTOR_TLS_{part}": str(folder / file) for part, file in files.items()}


def tls_environment(folder: Path, name: str) -> dict[str, str]:
    """Return this process's environment with those variables."""
    return {**os.environ, **tls_variables(folder, name)}
