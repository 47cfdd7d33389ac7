"""The files that rewarm makes under a root, as files: which there are, and removing them without touching others.

For moving a root as a whole. It does not look into records or the index.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from rewarm.store.disk import Disk
from rewarm.store.files import Files, RecordName

_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_KEYS = re.compile(r"[0-9a-f]{2}")
_QUARANTINED = re.compile(r"\d+-[0-9a-f]{64}\.(?:block|point)")
_TEMPORARY = re.compile(r"[0-9a-f]{16}(?:\.lock|-\d+\.tmp)|moving\.tmp")
_ROOT_FILES = ("store.json", "index.db", "index.db-wal", "index.db-shm", "CACHEDIR.TAG")


class Tree:
    """What lies under one root.

    Attributes:
        files: its records, by name.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self.files = Files(root, "0" * 16, disk)

    def small_files(self) -> Iterator[Path]:
        """Relative paths of what there is beside records, index and settings: who is who, quarantine, the tag."""
        for path in self._each(self._root):
            if path.name == "CACHEDIR.TAG" and _is_file(path):
                yield Path(path.name)
            elif _NAMESPACE.fullmatch(path.name) and _is_file(path / "identity.json"):
                yield Path(path.name) / "identity.json"
        for path in self._each(self._root / "quarantine"):
            if _QUARANTINED.fullmatch(path.name) and _is_file(path):
                yield Path("quarantine") / path.name

    def make_folders(self, folder: Path) -> None:
        """Make a folder under the root, and those between, mode 0700."""
        between = [each for each in (folder, *folder.parents) if self._root in each.parents]
        for each in reversed(between):
            self._disk.make_folder(each)

    def knows_links(self) -> bool:
        """Whether a file of the root can have a second name."""
        name = self._root / "tmp" / "moving.tmp"
        try:
            name.unlink(missing_ok=True)
            name.hardlink_to(self._root / "store.json")
        except OSError:
            return False
        with contextlib.suppress(OSError):
            name.unlink()
        return True

    def remove_records(self, but: Collection[RecordName]) -> None:
        """Remove every record that is not among `but`."""
        if self._root.is_dir():
            for name in list(self.files.records()):
                if name not in but:
                    self.files.remove(name)

    def remove(self) -> list[str]:
        """Remove everything that rewarm made, then the folder if it is empty; paths of what is left, relative."""
        own = [self._root / name for name in _ROOT_FILES]
        own += [self._root / path for path in self.small_files()]
        own += [path for path in self._each(self._root / "tmp") if _TEMPORARY.fullmatch(path.name)]
        for path in own:
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
        for name in list(self.files.records()):
            self.files.remove(name)
        for folder in self._folders():
            with contextlib.suppress(OSError):
                folder.rmdir()
        return [str(path.relative_to(self._root)) for path in self._left(self._root)]

    def sync_folders(self) -> None:
        """Push every folder's names to the medium."""
        for folder in self._folders():
            self.sync_folder(folder)

    def sync_folder(self, folder: Path) -> None:
        """Push one folder's names to the medium, where the system can."""
        try:
            fd = self._disk.open(folder)
        except (FileNotFoundError, PermissionError):
            return  # Windows opens no folders
        try:
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)

    def _folders(self) -> Iterator[Path]:
        """The folders that rewarm makes, deepest first, the root last; no links."""
        for path in self._each(self._root):
            if _NAMESPACE.fullmatch(path.name) and _is_folder(path):
                yield from (each for each in self._each(path) if _KEYS.fullmatch(each.name) and _is_folder(each))
                yield path
            elif path.name in ("quarantine", "tmp") and _is_folder(path):
                yield path
        yield self._root

    def _left(self, folder: Path) -> Iterator[Path]:
        for path in self._each(folder):
            if _is_folder(path):
                yield from self._left(path)
            else:
                yield path

    def _each(self, folder: Path) -> list[Path]:
        """What is in a folder, in order; nothing where it is not there or a link."""
        if not _is_folder(folder):
            return []
        with contextlib.suppress(OSError):
            return sorted(folder / entry.name for entry in self._disk.list_folder(folder))
        return []


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not path.is_symlink()  # noqa: PTH112  # quiet about what cannot be read
