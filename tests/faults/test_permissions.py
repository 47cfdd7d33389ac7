"""Files and folders that may not be read or written: nothing is lost, the reason is given, and all goes on later."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rewarm
from rewarm.testing.driver import Driver

SCRIPT = Path(__file__).with_name("unprivileged.py")
CASES = [
    "an_index_that_may_only_be_read",
    "a_root_that_may_only_be_read",
    "a_folder_that_becomes_read_only",
    "records_that_may_not_be_read",
    "records_that_may_not_be_removed",
    "settings_that_may_not_be_read",
    "an_empty_folder_that_may_only_be_read",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder in which everybody may write: pytest's own are for one user."""
    made = Path(tempfile.mkdtemp(prefix="rewarm-test-"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no permissions of this kind here")
@pytest.mark.parametrize("case", CASES)
def test_without_permission(folder: Path, case: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, case, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_case_is_run() -> None:
    for name in CASES:
        assert f"def {name}(" in SCRIPT.read_text()
    assert SCRIPT.read_text().count("(folder: Path) -> None:") == len(CASES)


def test_a_folder_that_was_there_before_becomes_private(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    Driver(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o755)  # an existing cache too
    rewarm.open(root).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_folder_with_other_files_keeps_its_mode_and_what_we_make_in_it_is_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o755)
    (root / "notes.txt").write_text("read by others")
    driver = Driver(root)
    driver.save(range(11))
    driver.flush()
    driver.close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert "holds other files" in caplog.text
    for path in root.iterdir():
        if path.name not in ("notes.txt", "CACHEDIR.TAG"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def become(path: Path, what: str) -> None:
    """Put something else under the name of a small file: a pipe that nobody writes to, or more than memory holds."""
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
        return
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("what", ["pipe", "huge"])
def test_settings_that_became_a_pipe_or_huge_are_said_and_hold_nobody_up(tmp_path: Path, what: str) -> None:
    driver = Driver(tmp_path / "root")
    tokens = list(range(12))
    driver.save(tokens)
    driver.flush()
    right = (driver.root / "store.json").read_bytes()
    become(driver.root / "store.json", what)
    with pytest.raises(rewarm.SettingsError, match=r"store\.json cannot be read"):
        driver.cache.settings()
    assert driver.restore([*tokens, 99]).n_tokens == len(tokens)
    driver.close()
    with pytest.raises(rewarm.SettingsError, match=r"store\.json cannot be read"):
        rewarm.open(driver.root)
    (driver.root / "store.json").unlink()
    (driver.root / "store.json").write_bytes(right)
    driver.open()
    assert driver.restore([*tokens, 99]).n_tokens == len(tokens)
    driver.close()


def test_an_identity_that_became_huge_harms_nobody(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "root")
    tokens = list(range(12))
    driver.save(tokens)
    driver.flush()
    driver.close()
    become(next(driver.root.glob("*/identity.json")), "huge")
    driver.open()
    assert driver.restore([*tokens, 99]).n_tokens == len(tokens)
    driver.close()
