"""Versions of an engine that compute the same KV: found by a probe, so that an update does not cost the cache.

An identity has the field `engine_epoch`: the version of the engine that opened its namespace. When another version
runs, a namespace that is equal in all other fields is looked for. If its `identity.json` lists the running version,
or if the KV of 64 fixed tokens, kept in it, is the running engine's within the spread that either version has
between chunk plans, then the running version takes its epoch and is listed from then on. Else it has its own.

The probe is a state like any other, under a tenant of its own: checked as records are, counted by the limits, and
when it has been evicted nothing is adopted. It does not know engines.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rewarm.cache.description import MAX_EPOCHS, Description, read_description
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Namespace
from rewarm.errors import RewarmError
from rewarm.state import identity as canonical
from rewarm.state.reason import Boundary
from rewarm.state.sequence import Array, SequenceState, Tensor
from rewarm.store.store import Store

log = logging.getLogger("rewarm.cache")

FIELD = "engine_epoch"
PROBE_TOKENS = tuple(1 + 37 * i % 61 for i in range(64))
"""What is evaluated: ids that every vocabulary has."""

PROBE_TENANT = b"rewarm/1 probe"
PROBE_LABEL = "rewarm probe"
_SPREAD = "spread:"

Probe = Callable[[], Sequence[SequenceState]]
"""The running engine's states after `PROBE_TOKENS`, from two chunk plans or more, in arrays of their own: the whole
in one piece first, then in others."""


class Epochs:
    """Finds the epoch of running engines in one cache.

    Args:
        store: whose namespaces.
        namespace: the namespace of an identity and a tenant.
    """

    def __init__(self, store: Store, namespace: Callable[[Identity, bytes], Namespace]) -> None:
        self._store = store
        self._namespace = namespace

    def adopt(self, identity: Identity, probe: Probe) -> Identity:
        """The identity to use for the running engine: `identity`, or the same with an earlier epoch."""
        running = identity.fields.get(FIELD)
        if identity.fingerprint_bytes is None or not isinstance(running, str):
            return identity
        lazy = _Lazy(probe)
        try:
            if self._store.description(identity.fingerprint_bytes) is None:
                for known in self._others(identity):
                    if running in known.epochs or self._agrees(identity, known, lazy):
                        found = identity.with_field(FIELD, _epoch(known))
                        self._list(found, running)
                        return found
            self._keep(identity, lazy)
        except (RewarmError, OSError, ValueError) as error:
            log.warning("whether another version of the engine computes the same cannot be told: %s", error)
        except Exception:
            # The engine's own code has run; whatever it raised must not keep the model from being served.
            log.exception("the probe of %r failed; what other versions of the engine stored is not used", identity.name)
        return identity

    def _others(self, identity: Identity) -> list[Description]:
        """The namespaces that differ in the epoch alone: those that list the running version first, then the latest."""
        running, found = identity.fields[FIELD], []
        own = _but_epoch(identity.fields)
        for _, data in self._store.read_descriptions().items():
            known = read_description(data)
            try:
                if known is not None and _epoch(known) and _but_epoch(known.fields()) == own:
                    found.append(known)
            except ValueError:
                continue
        return sorted(found, key=lambda each: (running in each.epochs, each.last_seen_s), reverse=True)

    def _agrees(self, identity: Identity, known: Description, probe: _Lazy) -> bool:
        """Whether the probe kept in a namespace is what the running engine computes."""
        space = self._namespace(identity.with_field(FIELD, _epoch(known)), PROBE_TENANT)
        stored = space.peek(PROBE_TOKENS)
        if stored.n_tokens != len(PROBE_TOKENS):
            return False
        agrees = same(stored, probe.states())
        log.info(
            "%s %s what %s computed: what that one stored is %s",
            identity.fields[FIELD],
            "computes" if agrees else "does not compute",
            _epoch(known),
            "used" if agrees else "not used",
        )
        return agrees

    def _list(self, identity: Identity, running: str) -> None:
        """Have a namespace say that the running version computes the same."""
        fingerprint = identity.fingerprint_bytes or b""
        known = read_description(self._store.description(fingerprint))
        if known is None or running in known.epochs:
            return
        epochs = (*known.epochs, running)[-MAX_EPOCHS:]
        said = Description(known.identity, known.name, known.last_seen_s, known.path, epochs)
        self._store.describe(fingerprint, said.encode())

    def _keep(self, identity: Identity, probe: _Lazy) -> None:
        """Store the running engine's probe, or have it count as used where it is there: each load keeps it recent."""
        space = self._namespace(identity, PROBE_TENANT)
        if space.refresh(PROBE_TOKENS):
            return
        first, *others = probe.states()
        spreads = {f"{_SPREAD}{name}": spread for name, spread in _spreads([first, *others]).items()}
        if all(map(math.isfinite, spreads.values())):
            space.save(PROBE_TOKENS, replace(first, meta=spreads), Boundary.SYSTEM, PROBE_LABEL)


class _Lazy:
    """The running engine's states, computed when they are first asked for."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._states: list[SequenceState] = []

    def states(self) -> list[SequenceState]:
        """The states.

        Raises:
            ValueError: they are not two or more of the right length and one layout.
        """
        if not self._states:
            found = list(self._probe())
            layouts = {state.layout() for state in found if state.n_tokens == len(PROBE_TOKENS)}
            if len(found) < 2 or len(layouts) != 1 or any(state.n_tokens != len(PROBE_TOKENS) for state in found):
                raise ValueError("a probe is two states or more, of the probe's tokens and of one layout")
            self._states = found
        return self._states


def same(stored: SequenceState, running: Sequence[SequenceState]) -> bool:
    """Whether a stored probe is what an engine computes, within the spread of either one's chunk plans."""
    if stored.layout() != running[0].layout():
        return False
    spreads = _spreads(running)
    for name, spread in spreads.items():
        own = stored.meta.get(f"{_SPREAD}{name}")
        allowed = max(spread, own) if isinstance(own, float) else spread
        if not _distance(stored.tensors[name], running[0].tensors[name]) <= allowed:
            return False
    return True


def _spreads(states: Sequence[SequenceState]) -> dict[str, float]:
    """By how much each tensor differs between chunk plans."""
    first, *others = states
    return {
        name: max((_distance(tensor, other.tensors[name]) for other in others), default=0.0)
        for name, tensor in first.tensors.items()
    }


def _distance(a: Tensor, b: Tensor) -> float:
    """The largest difference of floats; of anything else, how many elements differ. Infinite for other shapes."""
    if a.array.shape != b.array.shape or a.array.dtype != b.array.dtype:
        return math.inf
    if not a.array.size:
        return 0.0
    one, other = _as_floats(a), _as_floats(b)
    if one is None or other is None:
        return float(np.count_nonzero(a.array != b.array))
    difference = np.abs(one - other).max()
    return float(difference) if np.isfinite(difference) else math.inf


def _as_floats(tensor: Tensor) -> Array | None:
    if tensor.dtype == "bfloat16" and tensor.array.dtype.itemsize == 2:
        bits: Array = tensor.array.astype("<u4") << np.uint32(16)
        return bits.view("<f4").astype(np.float64)
    return tensor.array.astype(np.float64) if tensor.array.dtype.kind == "f" else None


def _epoch(known: Description) -> str:
    epoch = known.identity.get(FIELD)
    return epoch if isinstance(epoch, str) else ""


def _but_epoch(fields: canonical.Fields) -> bytes:
    return canonical.encode({name: value for name, value in fields.items() if name != FIELD})
