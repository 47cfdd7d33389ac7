"""A model's files: which of them decide its KV, what they looked like, and digests of their content.

`scan` lists and stats the files, reading no weights; `Model.describe` hashes them. Each file is compared with
what `scan` saw, through the open file, before and after it is read. Digests of weights are remembered in a
`Memo` by path, size, times, inode and device. What each kind of model consists of is in `docs/identity.md`. It
knows no engine, no settings and no thread.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from rewarm.cache.digest_memo import Memo
from rewarm.state import identity
from rewarm.state.identity import Plain

MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"

IRRELEVANT_CONFIG = frozenset({"_commit_hash", "_name_or_path", "transformers_version", "use_cache"})
"""Fields of a configuration that are proved to leave the KV alone. Any other one is part of the identity."""

IRRELEVANT_JSON = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""JSON files that act through the tokens, or on the choice of the next one. Any other one counts."""

_MAX_JSON_NBYTES = 16 * 2**20
_CHUNK_NBYTES = 8 * 2**20
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)

Progress = Callable[[int], None]
"""Called with the number of bytes that were done since the last call."""


class NoIdentity(Exception):
    """The files give no identity: the message says which and why. It ends in `Identity.error`."""


class Role(enum.Enum):
    """What a file is to a model."""

    WEIGHTS = enum.auto()
    CONFIG = enum.auto()
    JSON = enum.auto()
    CODE = enum.auto()


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells, without reading, that a file is the same as before.

    Attributes:
        path: under which the engine finds it.
        real: where it truly is: a hub's snapshot is made of links to blobs.
        nbytes: its size.
        mtime_ns, ctime_ns: of content and of the inode, which nobody can put back.
        inode, device: they change when another file is moved to the path.
    """

    path: Path
    real: str
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    def is_of(self, found: os.stat_result) -> bool:
        """Whether `found` is the state of this same file, unchanged."""
        return _facts(found) == (self.nbytes, self.mtime_ns, self.ctime_ns, self.inode, self.device)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file that decides the KV.

    Attributes:
        name: in its folder; of a shard its number.
        role: what it is to the model.
        stamp: what it looked like.
    """

    name: str
    role: Role
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Model:
    """A model, an adapter or another file that an engine loads, as it was found.

    Attributes:
        path: absolute, links not followed.
        config_name: of the configuration that its folder must hold.
        files: what decides the KV, in the order in which it is described.
        config: the folder's configuration without what is irrelevant; None for a file.
    """

    path: Path
    config_name: str
    files: tuple[ModelFile, ...]
    config: dict[str, Plain] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of weights, the measure of progress."""
        return sum(file.stamp.nbytes for file in self.files if file.role is Role.WEIGHTS)

    def describe(self, memo: Memo, progress: Progress) -> dict[str, Plain]:
        """The fields of an identity that the files give; reads what `memo` does not know.

        Raises:
            OSError: a file cannot be read.
            NoIdentity: a file is not the one that was found.
        """
        digests: dict[Role, dict[str, Plain]] = {role: {} for role in Role}
        for file in self.files:
            if file.role is Role.WEIGHTS:
                digests[file.role][file.name] = _remembered(file.stamp, memo, progress)
            elif file.role is Role.JSON:
                digests[file.role][file.name] = _json_digest(file.stamp)
            elif file.role is Role.CODE:
                digests[file.role][file.name] = digest(file.stamp)
        weights = digests[Role.WEIGHTS]
        if self.config is None:
            return {"weights": list(weights.values())}
        return {
            "weights": weights,
            "config": self.config,
            "files": digests[Role.JSON],
            "code": digests[Role.CODE],
        }

    def check(self) -> None:
        """See that the same files are there, unchanged.

        Raises:
            OSError: one cannot be looked at.
            NoIdentity: it has changed, or there is one more or less.
        """
        now = {file.name: file for file in scan(self.path, self.config_name).files}
        before = {file.name: file for file in self.files}
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) != before.get(name):
                raise _changed((now.get(name) or before[name]).stamp.path)


def scan(path: Path, config_name: str = MODEL_CONFIG) -> Model:
    """Find and stat the files of the model at `path`: a folder with `config_name`, or a file with its shards.

    Raises:
        OSError: a file is missing or cannot be looked at.
        NoIdentity: there is no model of a known kind.
    """
    path = path.absolute()
    if path.is_dir():
        return _scan_folder(path, config_name)
    return Model(path, config_name, tuple(_shards(path)))


def display_name(path: Path) -> str:
    """What people call the model at `path`; of a hub's snapshot the repository, so that revisions share it."""
    path = path.absolute()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    shard = _SHARD.fullmatch(path.name)
    return shard[1] if shard else path.name.removesuffix(".gguf")


def digest(stamp: Stamp, progress: Progress | None = None) -> str:
    """BLAKE3 of a file's content, in hex. Reads in pieces: a mapped file that is cut short kills the process.

    Raises:
        OSError: the file cannot be read.
        NoIdentity: it is not the one that was found.
    """
    # Half of the processors: the engine is loading the same files meanwhile.
    hasher = blake3(max_threads=max(1, (os.cpu_count() or 1) // 2))
    buffer = memoryview(bytearray(max(1, min(_CHUNK_NBYTES, stamp.nbytes))))
    with _unchanged(stamp) as fd, os.fdopen(fd, "rb", buffering=0, closefd=False) as stream:
        while n := stream.readinto(buffer):
            hasher.update(buffer[:n])
            if progress is not None:
                progress(n)
    return hasher.hexdigest()


def _scan_folder(folder: Path, config_name: str) -> Model:
    files = []
    for path in sorted(folder.iterdir()):
        role = _role(path.name, config_name)
        if role is not None:
            files.append(ModelFile(path.name, role, _stamp(path)))
    config_file = next((file for file in files if file.role is Role.CONFIG), None)
    if not any(file.role is Role.WEIGHTS for file in files):
        raise NoIdentity(f"{folder} holds no .safetensors files; of GGUF models, give the file itself")
    if config_file is None:
        raise NoIdentity(f"{folder} holds no {config_name}")
    config = _config(config_file.stamp)
    files.extend(_model_code(folder, config, {file.name for file in files}))
    return Model(folder, config_name, tuple(files), config)


def _role(name: str, config_name: str) -> Role | None:
    """What the file `name` is to the model in its folder; None when it does not touch the KV."""
    if name.startswith("."):  # file managers and copies leave such files: `._model.safetensors`
        return None
    if name == config_name:
        return Role.CONFIG
    if name.endswith(".safetensors"):
        return Role.WEIGHTS
    if name.endswith(".json"):
        return None if name in IRRELEVANT_JSON else Role.JSON
    return Role.CODE if name.endswith(".py") else None


def _model_code(folder: Path, config: dict[str, Plain], known: set[str]) -> Iterator[ModelFile]:
    """The source that a configuration names as the model's class, where the folder's listing lacks it."""
    name = config.get("model_file")
    if isinstance(name, str) and name not in known:
        yield ModelFile(name, Role.CODE, _stamp(folder / name))


def _shards(path: Path) -> Iterator[ModelFile]:
    """The file at `path`, or all shards of which it is one, in order. Their names are no part of them."""
    match = _SHARD.fullmatch(path.name)
    paths = [path]
    if match:
        count = int(match[3])
        paths = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for i, shard in enumerate(paths):
        yield ModelFile(str(i), Role.WEIGHTS, _stamp(shard))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise NoIdentity(f"{path} is no file")
    return Stamp(path, os.path.realpath(path), *_facts(found))


def _facts(found: os.stat_result) -> tuple[int, int, int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


@contextlib.contextmanager
def _unchanged(stamp: Stamp) -> Iterator[int]:
    """The file opened for reading, known to be the one that was found when it is opened and when it is closed."""
    fd = os.open(stamp.path, _OPEN_FLAGS)
    try:
        for last in (False, True):
            if not stamp.is_of(os.fstat(fd)):
                raise _changed(stamp.path)
            if not last:
                yield fd
    finally:
        os.close(fd)


def _changed(path: Path) -> NoIdentity:
    return NoIdentity(
        f"{path} changed while the model was being loaded: nothing says which content the engine has read, so this "
        "model runs uncached. Load it again to have it cached."
    )


def _remembered(stamp: Stamp, memo: Memo, progress: Progress) -> str:
    key = (stamp.nbytes, stamp.mtime_ns, stamp.ctime_ns, stamp.inode, stamp.device)
    if (known := memo.get(stamp.real, key)) is not None:
        progress(stamp.nbytes)
        return known
    found = digest(stamp, progress)
    memo.put(stamp.real, key, found)
    return found


def _read_json(stamp: Stamp) -> Any:
    """What a JSON file says; `ValueError` when it is none. NaN and infinity, which are no JSON, become bytes."""
    if stamp.nbytes > _MAX_JSON_NBYTES:
        raise ValueError("too large")
    with _unchanged(stamp) as fd, os.fdopen(fd, "rb", closefd=False) as stream:
        data = stream.read(_MAX_JSON_NBYTES)
    try:
        return json.loads(data, parse_constant=str.encode, parse_float=_float)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _float(text: str) -> float | bytes:
    value = float(text)
    if math.isfinite(value):
        return value
    return b"Infinity" if value > 0 else b"-Infinity"


def _config(stamp: Stamp) -> dict[str, Plain]:
    try:
        found = _read_json(stamp)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
        return identity.normalise(_relevant(found))
    except ValueError as error:
        raise NoIdentity(f"{stamp.path} cannot be read: {error}") from error


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration, and the configurations in it, without the fields that are proved irrelevant."""
    return {
        key: _relevant(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in IRRELEVANT_CONFIG
    }


def _json_digest(stamp: Stamp) -> str:
    """The digest of what a JSON file says, whatever its spacing; of its bytes when it says nothing valid."""
    try:
        return identity.fingerprint({"json": _read_json(stamp)}).hex()
    except ValueError:
        return digest(stamp)
