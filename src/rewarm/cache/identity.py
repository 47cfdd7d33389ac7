"""`Identity`: what a model's KV depends on, known at once or as soon as its weights are hashed.

Made from fields, from a model's files (hashed on a thread of its own, which `from_model` starts and nobody
else touches), or from a live model's parameters. It knows no engine: adapters hand in the engine's settings.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3

from rewarm.cache import model_files
from rewarm.cache.digest_memo import Memo, printable
from rewarm.cache.model_files import Model, NoIdentity
from rewarm.state import identity as canonical
from rewarm.state.identity import Fields, Value

log = logging.getLogger("rewarm.cache")

OWN_FIELDS = frozenset({"adapters", "code", "config", "files", "parameters", "weights"})
"""Fields that are read off the model; a setting cannot have one of these names."""

AdapterPath = tuple[str | os.PathLike[str], float | None]
"""Where an adapter is, and its scale; None where the adapter's own configuration holds it."""


class Identity:
    """What a model's KV depends on. Safe to use from several threads.

    Args:
        fields: names to str, int, float, bool, bytes, None, lists and mappings of these.
        name: for people, and to find earlier identities of the same model; no part of the identity.

    Raises:
        ValueError: a field that an identity cannot hold.
    """

    def __init__(self, fields: Fields, name: str | None = None) -> None:
        self._prepare(name)
        self._settle(fields, None)

    @classmethod
    def from_model(
        cls,
        path: str | os.PathLike[str],
        name: str | None = None,
        adapters: Sequence[AdapterPath] = (),
        memo: Memo | None = None,
        **settings: Value | Path,
    ) -> Identity:
        """The identity of a model's files. Returns at once; the content is hashed in the background.

        Call it before the engine reads the files: when they are not the same after hashing, there is no
        identity, and `error` says why. So it does for files that are missing, unreadable or of no known kind.

        Args:
            path: a folder with `config.json` and safetensors files, or a file (GGUF) with its shards.
            name: by default the folder's, the file's, or the repository's of a hub snapshot.
            adapters: in the order in which the engine applies them: a folder with `adapter_config.json` and
                safetensors files, or a file (a GGUF adapter, a control vector), and the scale.
            memo: where digests are remembered; by default in the user's cache folder.
            settings: whatever else changes the KV: the engine, its version and settings, the codec's version. A
                `Path` stands for the content of that file or model folder.

        Raises:
            ValueError: a setting that an identity cannot hold, or that has the name of one of its own fields.
        """
        parts = {key: value for key, value in settings.items() if isinstance(value, Path)}
        values = {key: value for key, value in settings.items() if not isinstance(value, Path)}
        _check_settings({**values, "scales": [scale for _, scale in adapters]}, settings)
        self = cls.__new__(cls)
        self._prepare(name if name is not None else model_files.display_name(Path(path)))
        self._path = os.path.abspath(path)  # noqa: PTH100  # the path as people know it: links are not followed
        try:
            work = _Work(Path(path), [(Path(where), scale) for where, scale in adapters], parts)
        except (OSError, NoIdentity) as error:
            self._settle(None, _why(error))
            return self
        self._work, self._total = work, work.nbytes
        thread = threading.Thread(
            target=self._hash, args=(work, values, memo or Memo()), name="rewarm-identity", daemon=True
        )
        thread.start()
        return self

    @classmethod
    def from_parameters(
        cls, parameters: Iterable[tuple[str, str, Sequence[int], Any]], name: str | None = None, **settings: Value
    ) -> Identity:
        """The identity of a live model whose files are not known, hashed on the calling thread.

        Args:
            parameters: of each its name, element type, shape, and its bytes in C order (any contiguous
                buffer); in any order, read one at a time.
            name: for people.
            settings: whatever else changes the KV: the model's arguments, the source of its class, the engine.

        Raises:
            ValueError: two parameters of one name, bytes in another order, or a setting that an identity cannot hold.
        """
        _check_settings(settings, settings)
        found: dict[str, Value] = {}
        for parameter, dtype, shape, data in parameters:
            if parameter in found:
                raise ValueError(f"two parameters are called {parameter!r}")
            hasher = blake3(max_threads=blake3.AUTO)
            view = memoryview(data)
            if not view.c_contiguous:
                raise ValueError(f"the bytes of {parameter!r} are not in C order")
            if view.nbytes:
                hasher.update(np.frombuffer(view, np.uint8).data)
            found[parameter] = [dtype, [int(n) for n in shape], hasher.digest()]
        return cls({**settings, "parameters": canonical.fingerprint(found).hex()}, name)

    @property
    def name(self) -> str | None:
        """What people call the model."""
        return self._name

    @property
    def path(self) -> str | None:
        """Where the model lay when it was identified, absolute; a hint, and no part of the identity."""
        return self._path

    @property
    def fields(self) -> Mapping[str, Value]:
        """What is hashed, in normal form; empty as long as the fingerprint is not known. Not to be changed."""
        return MappingProxyType(self._fields)

    @property
    def fingerprint(self) -> str | None:
        """64 lower-case hex characters; None as long as it is not known, and when there is no identity."""
        return None if self._fingerprint is None else self._fingerprint.hex()

    @property
    def fingerprint_bytes(self) -> bytes | None:
        """The fingerprint's 32 bytes, or None."""
        return self._fingerprint

    @property
    def error(self) -> str | None:
        """Why there is no identity and never will be; else None."""
        return self._error

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of weights that are hashed or known, and all of them. (0, 0) where no files are hashed."""
        return self._done_nbytes, self._total

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the fingerprint, `timeout` seconds at most; whether there is one. An error ends the wait."""
        return self._settled.wait(timeout) and self._fingerprint is not None

    def add_done_callback(self, callback: Callable[[Identity], None]) -> None:
        """Have `callback(self)` called once, when the fingerprint or the error is known: at once if it is.

        It is called on the hashing thread or on this one; what it raises is logged.
        """
        with self._lock:
            if not self._settled.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def with_field(self, name: str, value: Value) -> Identity:
        """The identity that differs in one field; of the same files, name and path.

        Raises:
            ValueError: the fingerprint is not known, or an identity cannot hold the value.
        """
        if self._fingerprint is None:
            raise ValueError("an identity that is not known yet has no fields")
        other = Identity({**self._fields, name: value}, self._name)
        other._path, other._work = self._path, self._work
        return other

    def files_unchanged(self) -> bool:
        """Whether the files are still those that were found at construction. Reads no content.

        For a seam to ask when its engine has loaded them, which may be long after they were hashed.
        """
        if self._work is None:
            return self._error is None
        try:
            self._work.check()
        except (OSError, NoIdentity):
            return False
        return True

    def __repr__(self) -> str:
        state = self.fingerprint or self._error or "pending"
        return f"Identity({self._name!r}, {state})"

    def _prepare(self, name: str | None) -> None:
        self._name = None if name is None else printable(name)
        self._path: str | None = None
        self._fields: Mapping[str, Value] = {}
        self._fingerprint: bytes | None = None
        self._error: str | None = None
        self._work: _Work | None = None
        self._done_nbytes = self._total = 0
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Identity], None]] = []

    def _hash(self, work: _Work, settings: Fields, memo: Memo) -> None:
        """On a thread of its own: read the files, then let go whoever waits, whatever happened."""
        try:
            fields = {**settings, **work.describe(memo, self._progressed)}
            work.check()
            self._settle(fields, None)
        except (OSError, NoIdentity, ValueError) as error:
            self._settle(None, _why(error))
        except Exception as error:
            log.exception("hashing %s failed", self._name)
            self._settle(None, f"hashing failed: {error!r}")

    def _progressed(self, nbytes: int) -> None:
        self._done_nbytes += nbytes

    def _settle(self, fields: Fields | None, error: str | None) -> None:
        known = None if fields is None else canonical.normalise(fields)
        fingerprint = None if known is None else canonical.fingerprint(known)
        with self._lock:
            self._fields, self._fingerprint, self._error = known or {}, fingerprint, error
            self._settled.set()
            callbacks, self._callbacks = self._callbacks, []
        if error is not None:
            log.warning("%s is served without a cache: %s", self._name, error)
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Identity], None]) -> None:
        try:
            callback(self)
        except Exception:
            log.exception("a callback of %r failed", self)


class _Work:
    """What `from_model` was given, as found on disk.

    Args:
        path: the model's.
        adapters: paths and scales, in order.
        parts: other files that count by content, by the name of their setting.

    Raises:
        OSError: a file is missing or cannot be looked at.
        NoIdentity: something is of no known kind.
    """

    def __init__(self, path: Path, adapters: Sequence[tuple[Path, float | None]], parts: Mapping[str, Path]) -> None:
        self.model = model_files.scan(path)
        self.adapters = [(model_files.scan(where, model_files.ADAPTER_CONFIG), scale) for where, scale in adapters]
        self.parts = {key: model_files.scan(where) for key, where in parts.items()}

    @property
    def nbytes(self) -> int:
        return sum(found.nbytes for found in self._all())

    def describe(self, memo: Memo, progress: model_files.Progress) -> dict[str, Value]:
        """The fields that the files give."""
        adapters: list[Value] = [{"scale": scale, **found.describe(memo, progress)} for found, scale in self.adapters]
        parts: dict[str, Value] = {key: found.describe(memo, progress) for key, found in self.parts.items()}
        return {**self.model.describe(memo, progress), "adapters": adapters, **parts}

    def check(self) -> None:
        """See that all files are those that were found; raises as `Model.check`."""
        for found in self._all():
            found.check()

    def _all(self) -> list[Model]:
        return [self.model, *(found for found, _ in self.adapters), *self.parts.values()]


def _why(error: OSError | NoIdentity | ValueError) -> str:
    return str(error) if isinstance(error, NoIdentity) else f"the model's files cannot be identified: {error}"


def _check_settings(values: Fields, settings: Mapping[str, object]) -> None:
    if taken := OWN_FIELDS & settings.keys():
        raise ValueError(f"settings cannot be called {', '.join(sorted(taken))}: the model's own fields are")
    canonical.normalise(values)
