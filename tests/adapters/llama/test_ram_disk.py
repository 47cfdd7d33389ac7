"""The RAM disk of macOS, by the commands that would make it: none of them is run here."""

from __future__ import annotations

import platform
import plistlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rewarm.adapters.llama import ram_disk, raw_folder
from rewarm.adapters.llama.raw_folder import RawFolder


class Mac:
    """Notes commands and answers as macOS does; fails at the one that begins with `fails`."""

    def __init__(self, fails: str = "", info: bytes = b"") -> None:
        self.commands: list[list[str]] = []
        self._fails, self._info = fails, info

    def __call__(self, command: Sequence[str]) -> bytes:
        self.commands.append(list(command))
        if self._fails and self._fails in command[0]:
            raise subprocess.CalledProcessError(1, list(command))
        return self._info if "info" in command else b"/dev/disk9  \n"


def test_a_disk_is_made_mounted_privately_and_released(tmp_path: Path) -> None:
    mac = Mac()
    disk = ram_disk.make(1000, tmp_path / "at", mac)
    assert disk is not None and disk.device == "/dev/disk9"
    assert mac.commands[0][-1] == "ram://2", "in sectors of 512 bytes, rounded up"
    assert [Path(command[0]).name for command in mac.commands] == ["hdiutil", "newfs_hfs", "mount"]
    assert disk.path.stat().st_mode & 0o777 == 0o700
    disk.release()
    assert mac.commands[-1][1:3] == ["detach", "/dev/disk9"]
    assert not (tmp_path / "at").exists()


@pytest.mark.parametrize("fails", ["hdiutil", "newfs_hfs", "mount"])
def test_where_it_cannot_be_made_nothing_is_left(tmp_path: Path, fails: str) -> None:
    mac = Mac(fails)
    assert ram_disk.make(1000, tmp_path / "at", mac) is None
    assert not (tmp_path / "at").exists()
    assert ("detach" in mac.commands[-1]) is (fails != "hdiutil")


def test_a_disk_of_a_process_that_ended_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mounts = [f"x-{ended.pid}", "x-1", "y-2", "x-notes"]
    entities = [{"dev-entry": f"/dev/{name}", "mount-point": str(tmp_path / name)} for name in mounts]
    mac = Mac(info=plistlib.dumps({"images": [{"system-entities": [{"dev-entry": "/dev/z"}, *entities]}]}))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    ram_disk.release_abandoned(tmp_path, "x-", mac)
    assert [command[2] for command in mac.commands if "detach" in command] == [f"/dev/x-{ended.pid}"]


def test_without_one_the_folder_is_beside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(ram_disk, "release_abandoned", lambda *_: None)
    monkeypatch.setattr(ram_disk, "make", lambda *_: None)
    folder = RawFolder(tmp_path / "beside", tmp_path / "none")
    assert not folder.in_memory and folder.path.parent == tmp_path / "beside"
    folder.close()
    released: list[bool] = []
    disk = ram_disk.RamDisk("/dev/disk9", tmp_path / "beside")
    monkeypatch.setattr(disk, "release", lambda: released.append(True))
    monkeypatch.setattr(ram_disk, "make", lambda *_: disk)
    monkeypatch.setattr(raw_folder, "ENOUGH_NBYTES", 1)
    folder = RawFolder(tmp_path / "beside", tmp_path / "none")
    assert folder.in_memory
    folder.close()
    folder.close()
    assert released == [True]
