"""mlx-lm 0.31.3 and 0.32.0, whose caches hand their state over in other ways than the newest release's.

They are fetched from the package registry, by hash, into `build/tmp`; everything else is the environment's. The
matrix then runs in a process that finds them first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
RELEASES = re.findall(r"^mlx-lm==(\S+)", (HERE / "older-releases.lock").read_text(), re.MULTILINE)
FAMILIES = "llama or gemma3 or kept or quantised or mamba2 or qwen3_next or falcon_h1 or lfm2 or llama4 or release"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("release", RELEASES)
def test_the_matrix_holds_on_an_older_release(release: str, tmp_path: Path) -> None:
    where = fetched(release)
    told = python(where, "-c", "import mlx_lm; print(mlx_lm.__version__, mlx_lm.__file__)")
    assert told.stdout.split() == [release, str(where / "mlx_lm" / "__init__.py")]
    files = [str(HERE / name) for name in ("test_matrix_families.py", "test_codec.py", "test_self_test.py")]
    # Short runs of everything: the long ones have their turn on the newest release.
    done = python(where, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'runs'}",
                  "-m", "not long", "-k", f"{FAMILIES} or test_codec or test_self_test", *files)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 80, done.stdout[-4000:]


def fetched(release: str) -> Path:
    """The folder of a release, fetched once per clone."""
    folder = ROOT / "build" / "tmp" / f"mlx-lm-{release}"
    if (folder / "complete").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = (HERE / "older-releases.lock").read_text().splitlines()
    own = folder / "own.lock"
    own.write_text("\n".join(line for line in lines if line.startswith(f"mlx-lm=={release} ")))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--upgrade",
         "--target", str(folder), "-r", str(own)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"mlx-lm {release} could not be fetched from the package registry:\n{done.stderr}"
    (folder / "complete").touch()
    return folder


def python(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The environment's interpreter, which finds what is in `where` first."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(where)},
        timeout=800,
    )
