"""A model's weight files: which they are, what they were when the engine loaded them, and their content's digest.

Weights are hashed once; the digest is remembered by path, size, mtime, ctime, inode and device, in a small
JSON file that may be lost or damaged at any time. This module knows files, not identities or engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs
from blake3 import blake3

_CHUNK = 16 * 2**20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_REMEMBERED = 4096
_SETTLED_NS = 2 * 10**9
"""A file that changed less than this long ago is hashed but not remembered: it may change again unseen."""


class FilesChanged(Exception):
    """A model's files are not what they were when they were first looked at."""


class Stamp(msgspec.Struct, frozen=True):
    """What tells one state of a file from another, short of its content."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def stamp(path: Path) -> Stamp:
    """The stamp of a file, links followed.

    Raises:
        OSError: it cannot be looked at.
    """
    real = path.resolve(strict=True)
    status = real.stat()
    return Stamp(str(real), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights: a folder's safetensors files, or a GGUF file with all its shards.

    Raises:
        FileNotFoundError: there are none, or a shard is missing.
    """
    if model.is_dir():
        found = sorted(path for path in model.iterdir() if path.suffix in (".safetensors", ".npz", ".gguf"))
        if not found:
            raise FileNotFoundError(f"no weights (*.safetensors) in {model}")
        return found
    match = _SHARD.fullmatch(model.name)
    if match is None:
        return [model]
    count = int(match[3])
    shards = [model.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for shard in shards:
        if not shard.exists():
            raise FileNotFoundError(f"the shard {shard.name} is missing")
    return shards


class _Remembered(msgspec.Struct, frozen=True):
    stamp: Stamp
    digest: str


class _Memo(msgspec.Struct):
    version: int = 1
    files: list[_Remembered] = []


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of files, remembered in `memo`.

    Attributes:
        memo: the JSON file.
    """

    memo: Path

    @classmethod
    def default(cls) -> Digests:
        """Remembered in the user's cache folder for rewarm."""
        return cls(Path(platformdirs.user_cache_dir("rewarm")) / "model-digests.json")

    def of(self, stamps: Sequence[Stamp], progress: Callable[[int], None]) -> list[str]:
        """The digests of the files that `stamps` were taken of, hex; 64 characters each.

        Args:
            stamps: taken before the engine read the files.
            progress: called with the number of bytes that were hashed, or known, since the last call.

        Raises:
            FilesChanged: a file is no longer what its stamp says.
            OSError: a file cannot be read.
        """
        known = {each.stamp: each.digest for each in self._read().files}
        digests: list[str] = []
        new: list[_Remembered] = []
        for each in stamps:
            digest = known.get(each)
            if digest is None:
                started_ns = time.time_ns()
                digest = _hash(Path(each.path), progress)
                if abs(started_ns - max(each.ctime_ns, each.mtime_ns)) > _SETTLED_NS:
                    new.append(_Remembered(each, digest))
            else:
                progress(each.size)
            digests.append(digest)
        for each in stamps:
            if stamp(Path(each.path)) != each:
                raise FilesChanged(f"{each.path} changed while the model was being loaded")
        if new:
            self._remember(new)
        return digests

    def _read(self) -> _Memo:
        try:
            memo = msgspec.json.decode(self.memo.read_bytes(), type=_Memo)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return _Memo()
        whole = all(re.fullmatch("[0-9a-f]{64}", each.digest) for each in memo.files)
        return memo if memo.version == 1 and whole else _Memo()

    def _remember(self, new: list[_Remembered]) -> None:
        """Add to the file; another process' additions of the same moment may be lost, and are made again."""
        paths = {each.stamp.path for each in new}
        old = [each for each in self._read().files if each.stamp.path not in paths]
        data = msgspec.json.encode(_Memo(files=[*old, *new][-_MAX_REMEMBERED:]))
        temporary = self.memo.with_name(f"{self.memo.name}.{secrets.token_hex(8)}.tmp")
        with contextlib.suppress(OSError):
            self.memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                temporary.replace(self.memo)
            finally:
                temporary.unlink(missing_ok=True)


def _hash(path: Path, progress: Callable[[int], None]) -> str:
    # Read, not mapped: a file that is cut short meanwhile must not end the process.
    hasher = blake3(max_threads=blake3.AUTO)
    buffer = bytearray(_CHUNK)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:n])
            progress(n)
    return hasher.hexdigest()
