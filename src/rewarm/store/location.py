"""What a folder is like as a place for a cache: can it be written, what is free, what speaks against it.

Looks only: makes nothing but one empty file, which it removes again. It does not know roots from the inside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_NETWORK = {"9p", "afpfs", "afs", "ceph", "cifs", "glusterfs", "ncpfs", "nfs", "nfs4", "smb", "smb2", "smb3", "smbfs"}
_NETWORK |= {"webdav", "davfs", "fuse.sshfs", "fuse.rclone", "fuse.glusterfs", "fuse.s3fs", "fuse.davfs2"}
_MEMORY = {"ramfs", "tmpfs"}
_WITHOUT_OWNERS = {"exfat", "fat", "fat32", "msdos", "vfat"}
_SYNCED = {
    "Dropbox": "Dropbox",
    "Google Drive": "Google Drive",
    "GoogleDrive": "Google Drive",
    "Mobile Documents": "iCloud Drive",
    "Nextcloud": "Nextcloud",
    "OneDrive": "OneDrive",
    "ownCloud": "ownCloud",
}
_SYNC_MARKS = {".dropbox": "Dropbox", ".stfolder": "Syncthing", ".sync": "Resilio Sync"}


@dataclass(frozen=True, slots=True)
class Location:
    """A folder as a place for a cache.

    Attributes:
        path: absolute, links followed.
        exists: whether there is a folder already.
        writable: whether files can be made there; of a folder that is not there, in the nearest one above it.
        free_bytes: that this user may still write; None where that cannot be told.
        total_bytes: of its disk, or None.
        warnings: what speaks against it, in sentences; none is a reason to refuse it.
    """

    path: Path
    exists: bool
    writable: bool
    free_bytes: int | None
    total_bytes: int | None
    warnings: tuple[str, ...] = ()


def describe_location(path: str | os.PathLike[str]) -> Location:
    """What the folder `path` is like as a place for a cache; it need not be there. Waits for its disk."""
    folder = Path(path).expanduser().absolute()
    with contextlib.suppress(OSError, RuntimeError):  # a loop of links
        folder = folder.resolve()
    there = _nearest(folder)
    free = total = None
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(there)
        free, total = usage.free, usage.total
    exists = folder.is_dir()
    # What is there and is no folder, on the way down, cannot become one.
    is_barred = any(_is_there(each) for each in (folder, *folder.parents) if there in each.parents)
    writable = not is_barred and _can_write(there)
    return Location(folder, exists, writable, free, total, _warnings(there))


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if each.is_dir():
                return each
    return folder


def _is_there(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except OSError:
        return True


def _can_write(folder: Path) -> bool:
    try:
        fd, name = tempfile.mkstemp(prefix=".rewarm-", suffix=".tmp", dir=folder)
        os.close(fd)
        Path(name).unlink()
    except OSError:
        return False
    return True


def _warnings(folder: Path) -> tuple[str, ...]:
    found = []
    kind, mount = _file_system(folder)
    if kind in _NETWORK:
        found.append(f"It is on a network ({kind}): loading may take longer than computing, and locks may not hold.")
    elif kind in _MEMORY:
        found.append(f"It is in memory ({kind}): what is kept there is gone when the computer is restarted.")
    elif kind in _WITHOUT_OWNERS:
        found.append(f"Its file system ({kind}) knows no owners: other users of this computer can read the cache.")
    if mount is not None and _is_removable(mount):
        found.append("It seems to be on a drive that can be unplugged: without it, nothing is restored or saved.")
    service = _synced_by(folder)
    if service is not None:
        found.append(f"{service} keeps this folder in step with other places: every change would be sent there.")
    return tuple(found)


def _file_system(folder: Path) -> tuple[str, Path | None]:
    """Kind of the file system that `folder` is on, in lower case ("" where unknown), and where it is mounted."""
    best: tuple[str, Path | None] = ("", None)
    with contextlib.suppress(OSError, RuntimeError, psutil.Error):
        for part in psutil.disk_partitions(all=True):
            mount = Path(part.mountpoint)
            inside = folder == mount or mount in folder.parents
            if inside and (best[1] is None or len(mount.parts) >= len(best[1].parts)):
                best = (part.fstype.lower(), mount)
    return best


def _is_removable(mount: Path) -> bool:
    parts = mount.parts
    return len(parts) > 2 and (parts[1] in ("media", "Volumes") or parts[1:3] == ("run", "media"))


def _synced_by(folder: Path) -> str | None:
    for each in (folder, *folder.parents):
        for name, service in _SYNCED.items():
            if each.name == name or each.name.startswith((f"{name} -", f"{name}-")):
                return service
        for mark, service in _SYNC_MARKS.items():
            if _is_there(each / mark):
                return service
    return None
