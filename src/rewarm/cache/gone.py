"""Which models are gone, so that what was kept of them makes room first.

Gone is a model whose files are no longer where they lay, and one in whose place another lies: of the same name
and path, used later, with other weights, configuration or code, or under another version of the engine. A model
with other settings (the bits of its KV, an adapter) is not gone: it may be used by turns. None of this decides
what is right: records of a gone model are served as long as they are there, and pins hold.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from rewarm.cache.description import Description, read_description
from rewarm.cache.reading import ReadPool
from rewarm.state.identity import differing
from rewarm.store.store import Store

CONTENT = frozenset({"code", "codec", "config", "engine_epoch", "files", "model_code", "weights"})
"""Fields that change when a model is replaced, or its engine."""

FRESH_S = 60.0
FIRST_WAIT_S = 1.0

MISSING, REPLACED = "missing", "replaced"


def gone(described: Iterable[tuple[bytes, bytes]], is_there: Callable[[str], bool]) -> dict[bytes, str]:
    """The namespaces whose models are gone, by fingerprint: `missing` or `replaced`. Pure but for `is_there`.

    Args:
        described: fingerprint and `identity.json` of each namespace.
        is_there: whether there is something at a path.
    """
    read = {fingerprint: read_description(data) for fingerprint, data in described}
    known = {fingerprint: each for fingerprint, each in read.items() if each is not None and each.path}
    found: dict[bytes, str] = {}
    for fingerprint, each in known.items():
        if not is_there(each.path or ""):
            found[fingerprint] = MISSING
        elif any(_replaces(other, each) for other in known.values()):
            found[fingerprint] = REPLACED
    return found


def _replaces(later: Description, earlier: Description) -> bool:
    if (later.path, later.name) != (earlier.path, earlier.name) or later.last_seen_s <= earlier.last_seen_s:
        return False
    try:
        differs = {field.partition(".")[0] for field in differing(earlier.fields(), later.fields())}
    except ValueError:
        return False
    return bool(differs) and differs <= CONTENT


class Gone:
    """Looks now and then, on a thread that may hang: a model's files may be on a disk that does not answer.

    Args:
        store: whose namespaces.
        pool: the thread to look on.
        monotonic: seconds that never jump.
    """

    def __init__(self, store: Store, pool: ReadPool, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._pool = pool
        self._monotonic = monotonic
        self._found: Mapping[bytes, str] = {}
        self._looked_s: float | None = None
        self._looking: Future[None] | None = None

    def known(self) -> Mapping[bytes, str]:
        """Those that are gone, as of a minute ago or so; waits for nothing but, the first time, a second."""
        now = self._monotonic()
        first = self._looked_s is None
        if first or now > (self._looked_s or 0.0) + FRESH_S:
            self._looked_s = now
            if self._looking is None or self._looking.done():
                self._looking = self._pool.submit(self._look)
        if first and self._looking is not None:
            with contextlib.suppress(TimeoutError, OSError, ValueError):
                self._looking.result(FIRST_WAIT_S)
        return self._found

    def _look(self) -> None:
        self._found = gone(self._store.read_descriptions().items(), _is_there)


def _is_there(path: str) -> bool:
    try:
        Path(path).stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # that it cannot be looked at proves nothing
    return True
