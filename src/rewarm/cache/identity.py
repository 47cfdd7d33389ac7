"""Identity: everything that decides a model's KV, and the fingerprint that names its folder.

Made from plain fields, from a model's files (hashed in the background), or from a live model's parameters.
It knows files and values; which settings matter to an engine is that engine's adapter's business.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from blake3 import blake3

from rewarm.cache.model_files import Digests, FilesChanged, Stamp, stamp, weight_files
from rewarm.state.identity import fingerprint

log = logging.getLogger("rewarm.cache")

IRRELEVANT_CONFIG = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "use_cache"})
"""Fields of `config.json` that are proved not to change the KV: where the model came from, which version of
transformers wrote the file, and whether transformers itself keeps a cache. All others belong to the identity."""


class Identity:
    """What a model's KV depends on.

    Args:
        fields: names to str, int, float, bool, bytes, None, lists and mappings of these.
        name: for people; not part of the identity.

    Raises:
        ValueError: a field that an identity cannot hold.
    """

    def __init__(self, fields: Mapping[str, Any], name: str | None = None) -> None:
        self.name = name
        self._fields: dict[str, Any] = dict(fields)
        self._fingerprint: bytes | None = fingerprint(self._fields)
        self._error: str | None = None
        self._done = threading.Event()
        self._done.set()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Identity], None]] = []
        self._hashed = self._total = 0

    @classmethod
    def from_model(
        cls,
        path: str | PathLike[str],
        name: str | None = None,
        adapters: Sequence[tuple[str | PathLike[str], float]] = (),
        digests: Digests | None = None,
        **settings: Any,
    ) -> Identity:
        """The identity of a model folder or GGUF file; returns at once and hashes in the background.

        Call it before the engine reads the files: when they are not the same afterwards, there is no identity.

        Args:
            path: a folder with `config.json` and safetensors files, or one GGUF file (of several, any shard).
            name: for people; by default the folder's or file's.
            adapters: paths and scales, in the order in which the engine applies them.
            digests: where digests are remembered.
            settings: the engine's settings and version, as fields.

        Raises:
            ValueError: a setting that an identity cannot hold.
        """
        model = Path(path)
        self = cls({"settings": settings}, name or model.stem if model.suffix == ".gguf" else name or model.name)
        self._fingerprint = None
        self._done.clear()
        try:
            stamps = [stamp(file) for file in weight_files(model)]
            config = _config(model) if model.is_dir() else None
            others = [(_adapter_stamps(Path(where)), _adapter_config(Path(where)), scale) for where, scale in adapters]
        except (OSError, ValueError) as error:
            self._settle(None, f"the model's files cannot be identified: {error}")
            return self
        self._total = sum(each.size for each in [*stamps, *(s for other in others for s in other[0])])
        fields = {"config": config, "settings": settings}
        work = (digests or Digests.default(), stamps, others, fields)
        threading.Thread(target=self._hash, args=work, name="rewarm-identity", daemon=True).start()
        return self

    @classmethod
    def from_parameters(
        cls, parameters: Iterable[tuple[str, str, Sequence[int], Any]], name: str | None = None, **settings: Any
    ) -> Identity:
        """The identity of a live model without files, hashed on the calling thread.

        Args:
            parameters: name, element type, shape and C-contiguous bytes of each, in any order.
            name: for people.
            settings: the model's arguments, the source of its class, the engine's version, as fields.

        Raises:
            ValueError: a setting that an identity cannot hold.
        """
        digests: dict[str, str] = {}
        for parameter, dtype, shape, data in parameters:
            hasher = blake3(f"{dtype} {tuple(shape)} ".encode(), max_threads=blake3.AUTO)
            digests[parameter] = hasher.update(data).hexdigest()
        return cls({"parameters": digests, "settings": settings}, name)

    def _hash(
        self,
        digests: Digests,
        stamps: list[Stamp],
        adapters: list[tuple[list[Stamp], Any, float]],
        fields: dict[str, Any],
    ) -> None:
        """On a thread of its own: fill in the digests, then tell who waits."""
        try:
            # Sorted: each file says itself which tensors it holds, so the files' names and order do not matter.
            weights = sorted(digests.of(stamps, self._progressed))
            applied = [
                {"files": digests.of(own, self._progressed), "config": config, "scale": scale}
                for own, config, scale in adapters
            ]
            found = {**fields, "weights": weights, "adapters": applied}
            fingerprint(found)
        except FilesChanged as error:
            self._settle(None, f"{error}; it is served without a cache until it is loaded again")
        except (OSError, ValueError) as error:
            self._settle(None, f"the model's files cannot be identified: {error}")
        except BaseException as error:  # noqa: BLE001 - whoever waits must be told, whatever it was
            self._settle(None, f"the model's files cannot be identified: {type(error).__name__}: {error}")
        else:
            self._settle(found, None)

    def _progressed(self, nbytes: int) -> None:
        self._hashed += nbytes

    def _settle(self, fields: dict[str, Any] | None, error: str | None) -> None:
        with self._lock:
            if fields is not None:
                self._fields, self._fingerprint = fields, fingerprint(fields)
            self._error = error
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        if error:
            log.warning("%s: %s", self.name, error)
        for callback in callbacks:
            callback(self)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The fields that are hashed; while the weights are being read, those that are known."""
        return self._fields

    @property
    def fingerprint_bytes(self) -> bytes | None:
        """32 bytes, or None while the weights are being read or when there is no identity."""
        return self._fingerprint

    @property
    def fingerprint(self) -> str | None:
        """64 hex characters, or None."""
        return self._fingerprint.hex() if self._fingerprint is not None else None

    @property
    def error(self) -> str | None:
        """Why there is no identity and never will be, or None."""
        return self._error

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes hashed, and bytes to hash."""
        return self._hashed, self._total

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the fingerprint; whether there is one."""
        return self._done.wait(timeout) and self._fingerprint is not None

    def add_done_callback(self, callback: Callable[[Identity], None]) -> None:
        """Have `callback(self)` called once it is known whether there is an identity; at once if it is."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {folder}")
    return _json(path, IRRELEVANT_CONFIG)


def _json(path: Path, without: Iterable[str] = ()) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings")
    return {name: value for name, value in found.items() if name not in without}


def _adapter_stamps(path: Path) -> list[Stamp]:
    if not path.is_dir():
        return [stamp(path)]
    return [stamp(file) for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".npz", ".gguf")]


def _adapter_config(path: Path) -> dict[str, Any] | None:
    config = path / "adapter_config.json"
    return _json(config) if path.is_dir() and config.is_file() else None
