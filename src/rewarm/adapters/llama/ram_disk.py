"""A RAM disk on macOS, which has no memory file system: made by `hdiutil` without root, and released by us.

Knows the commands and nothing of what is kept there. Nothing here runs on another system; the tests look at
the commands only, and no one has run them on a Mac for this version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import plistlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SECTOR_NBYTES = 512
_TIMEOUT_S = 30.0

Run = Callable[[Sequence[str]], bytes]
"""Runs a command and gives what it prints; raises OSError or a `subprocess.SubprocessError`."""


def run(command: Sequence[str]) -> bytes:
    """Run a command of the system's."""
    return subprocess.run(  # noqa: S603 - a list; programs of the system, by their full paths
        command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S
    ).stdout


class RamDisk:
    """A disk in memory, from its making to `release`.

    Args:
        device: as the system names it.
        path: where it is mounted; for the user alone.
        run: runs a command.
    """

    def __init__(self, device: str, path: Path, run: Run = run) -> None:
        self.device = device
        self.path = path
        self._run = run

    def release(self) -> None:
        """Give its memory back; what is on it is gone."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._run(["/usr/bin/hdiutil", "detach", self.device, "-force"])
        with contextlib.suppress(OSError):
            self.path.rmdir()


def make(nbytes: int, mount_at: Path, run: Run = run) -> RamDisk | None:
    """A disk of `nbytes` mounted at an empty folder of ours; None, with the reason logged, where there is none.

    Memory is taken as it is written to: an empty disk costs next to none.
    """
    device = ""
    try:
        device = (
            run(["/usr/bin/hdiutil", "attach", "-nomount", f"ram://{-(-nbytes // SECTOR_NBYTES)}"]).decode().strip()
        )
        run(["/sbin/newfs_hfs", "-v", "rewarm", device])
        mount_at.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not in the Finder, no indexing of what is on it, no programs from it.
        options = ["-o", "nobrowse,nosuid,nodev,noexec"]
        run(["/sbin/mount", "-t", "hfs", *options, device, str(mount_at)])
        os.chmod(mount_at, 0o700)  # noqa: PTH101 - of the file system's root, not of the folder beneath it
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("rewarm: no RAM disk could be made: %s", error)
        if device:
            RamDisk(device, mount_at, run).release()
        return None
    return RamDisk(device, mount_at, run)


def release_abandoned(place: Path, prefix: str, run: Run = run) -> None:
    """Release RAM disks mounted at folders of ours, named `prefix`..., whose process has ended."""
    if platform.system() != "Darwin":
        return
    try:
        images = plistlib.loads(run(["/usr/bin/hdiutil", "info", "-plist"])).get("images", [])
    except (OSError, subprocess.SubprocessError, ValueError):
        return
    for entity in (entity for image in images for entity in image.get("system-entities", [])):
        path = Path(entity.get("mount-point") or "/")
        if path.parent == place and path.name.startswith(prefix) and not _runs(path.name.removeprefix(prefix)):
            RamDisk(str(entity["dev-entry"]), path, run).release()


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ValueError:
        return True  # not one of ours
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
