"""Out of the slots into the store: who saves a slot when, and takes its file apart.

A slot is saved only if all its cells were computed for exactly its token list under one identity; the slot
file's own list says which tokens these are. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from queue import SimpleQueue

from rewarm.adapters.llama.codec import CodecState
from rewarm.adapters.llama.engine import EngineGone, Refused
from rewarm.adapters.llama.identity import Before
from rewarm.adapters.llama.slot_files import NoRoom, RawFile, SlotFiles
from rewarm.adapters.llama.slots import Point, Slot, SlotPool, Tokens
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Dropped
from rewarm.state.sequence import Rows, SequenceState
from rewarm.store.forgotten import Forgotten

log = logging.getLogger(__name__)

_REPLY_TOKENS = 1024
"""Allowed for in the room that a save needs: the reply's length is not known before."""

_FULL_WAIT_S = 0.1
"""Between two attempts to hand a state to a queue that is full."""

_REMEMBERED_STALLS = 256
_TENANTS = 64


@dataclass(frozen=True, slots=True)
class Unread:
    """A raw file that waits to be taken apart.

    Attributes:
        file: in the raw folder.
        slot: that it was saved from.
        version: the slot's at the save.
        n_prompt: tokens of the prompt that the slot last served.
        n_system: where its system prompt ends.
        label: of its conversation.
        tenant: whose it is.
        n_forgets: how often conversations had been forgotten by then.
    """

    file: RawFile
    slot: Slot
    version: int
    n_prompt: int
    n_system: int
    label: str | None
    tenant: bytes
    n_forgets: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tier stores with.

    Attributes:
        cache: the prefix cache.
        identity: of the model.
        before: its files, as they were before the engine read them.
        files: saves and restores slots.
        cut_anywhere: whether the model's states may be cut at any token.
        n_ctx: tokens that one slot holds.
    """

    cache: PrefixCache
    identity: Identity
    before: Before
    files: SlotFiles
    cut_anywhere: bool
    n_ctx: int
    _spaces: OrderedDict[bytes, Namespace] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def space(self, tenant: bytes = b"") -> Namespace:
        """This model's namespace in the cache, for one tenant."""
        with self._lock:
            found = self._spaces.pop(tenant, None) or self.cache.namespace(self.identity, tenant)
            self._spaces[tenant] = found
            while len(self._spaces) > _TENANTS:
                self._spaces.popitem(last=False)
            return found

    @property
    def policy(self) -> Policy:
        """The rules in force."""
        return self.cache.policy()


@dataclass(slots=True)
class Saves:
    """What saving slots has cost so far, for people and programs.

    Attributes:
        n: slots that the server has written.
        nbytes: of their files.
        stall_s: for how long the server stood still for them.
        longest_s: the longest of these times.
        n_waited: states that had to wait for room in the cache's queue.
        n_refused: saves that the server refused, or that there was no room for.
    """

    n: int = 0
    nbytes: int = 0
    stall_s: float = 0.0
    longest_s: float = 0.0
    n_waited: int = 0
    n_refused: int = 0


class SlotSaver:
    """Saves the slots of one server. Safe to use from several threads.

    Args:
        pool: the slots.
        stored: what to store with.

    Attributes:
        unread: raw files that wait to be taken apart; None ends whoever reads them.
        totals: what saving has cost.
        is_void: nothing more is stored: the model is another one by now.
        is_closing: nothing waits for a full queue any more.
    """

    def __init__(self, pool: SlotPool, stored: Stored) -> None:
        self.unread: SimpleQueue[Unread | None] = SimpleQueue()
        self.totals = Saves()
        self.is_void = False
        self.is_closing = threading.Event()
        self.forgets: list[Forgotten] = []
        self._pool = pool
        self._stored = stored
        self._lock = threading.Lock()
        self._n_unread = 0
        self._stalls: deque[tuple[float, float, int]] = deque(maxlen=_REMEMBERED_STALLS)

    @property
    def is_settled(self) -> bool:
        """Whether all raw files have been taken apart."""
        return self._n_unread == 0

    def save_idle(self) -> int:
        """Have the server write every idle slot with something new; how many are left unsaved."""
        left = 0
        for slot in self._pool.dirty():
            with self._pool.saving(slot) as free:
                if free:
                    self.save(slot)
            left += slot.dirty
        return left

    def save(self, slot: Slot) -> None:
        """Have the server write a slot that the caller holds, if it has something new. Faults are logged."""
        stored = self._stored
        if not slot.dirty or slot.tainted or slot.tenant is None or stored.policy.paused:
            return
        if stored.identity.error or self.is_void:
            slot.dirty = False
            return
        try:
            file = stored.files.save(slot.id, len(slot.live) + _REPLY_TOKENS)
        except NoRoom:
            self.totals.n_refused += 1
            log.warning("rewarm: slot %d is not saved now: the folder for slot files has no room", slot.id)
            return
        except Refused as error:
            self.totals.n_refused += 1
            slot.dirty = False
            log.warning("rewarm: the server did not save slot %d: %s", slot.id, error)
            return
        except EngineGone:
            slot.forget()
            return
        self._note(slot, file)
        with self._lock:
            self._n_unread += 1
        slot.dirty = False
        n_forgets = len(self.forgets)
        self.unread.put(
            Unread(file, slot, slot.version, len(slot.live), slot.n_system, slot.label, slot.tenant, n_forgets)
        )

    def stalled(self, since: float, other_than: Slot | None) -> float:
        """For how many seconds saves of other slots made the server stand still since `since` (monotonic)."""
        own = -1 if other_than is None else other_than.id
        with self._lock:
            return sum(took_s for at, took_s, number in self._stalls if at >= since and number != own)

    def keep(self, unread: Unread) -> None:
        """Take a raw file apart and store what is new in it. Waits for the raw folder, and for a full queue."""
        try:
            self._keep(unread)
        finally:
            with self._lock:
                self._n_unread -= 1

    def _note(self, slot: Slot, file: RawFile) -> None:
        log.info(
            "rewarm: slot %d saved: %d tokens, %d bytes; the server stood still for %.3f s",
            slot.id,
            file.n_tokens,
            file.nbytes,
            file.stall_s,
        )
        with self._lock:
            self._stalls.append((time.monotonic(), file.stall_s, slot.id))
            totals = self.totals
            totals.n += 1
            totals.nbytes += file.nbytes
            totals.stall_s += file.stall_s
            totals.longest_s = max(totals.longest_s, file.stall_s)

    def _keep(self, unread: Unread) -> None:
        stored = self._stored
        found = stored.files.read(unread.file)
        if found is None or not found.state.n_tokens:
            return
        if self.is_void or not stored.before.unchanged():
            log.warning("rewarm: the model's files or scales have changed since the engine read them; not saved")
            return
        if self._is_forgotten(unread, found.tokens):
            return  # while it waited
        self._store(found, unread)
        points = tuple(Point(point.n_tokens, gate) for point, gate in zip(found.points, found.gates, strict=True))
        self._pool.learn(unread.slot, unread.version, found.tokens, points)

    def _is_forgotten(self, unread: Unread, tokens: Tokens) -> bool:
        space = self._stored.space(unread.tenant)
        return any(space.holds_any(keys, tokens) for keys in self.forgets[unread.n_forgets :])

    def _store(self, found: CodecState, unread: Unread) -> None:
        n, n_system = found.state.n_tokens, unread.n_system
        for point in found.points:
            self._hand_over(
                unread, found.tokens, point, Boundary.SYSTEM if point.n_tokens == n_system else Boundary.PREFILL
            )
        if 0 < n_system < n and self._stored.cut_anywhere:
            system = cut(found.state, n_system)
            if system is not None:
                self._hand_over(unread, found.tokens, system, Boundary.SYSTEM)
        boundary = Boundary.PREFILL if n < unread.n_prompt else Boundary.ASSISTANT
        self._hand_over(unread, found.tokens, found.state, Boundary.SYSTEM if n == n_system else boundary)

    def _hand_over(self, unread: Unread, tokens: Tokens, state: SequenceState, boundary: Boundary) -> None:
        """Give the cache a state; where its queue is full, wait for room: the raw file keeps it meanwhile."""
        own = tokens[: state.n_tokens]
        # A system prompt is every conversation's.
        label = None if boundary is Boundary.SYSTEM else unread.label
        space = self._stored.space(unread.tenant)
        report = space.save(own, state, boundary, label)
        if report.reason is not Dropped.QUEUE_FULL:
            return
        self.totals.n_waited += 1
        while not self.is_closing.wait(_FULL_WAIT_S):
            is_empty = self._stored.cache.flush(_FULL_WAIT_S)
            if self._is_forgotten(unread, own):
                return
            report = space.save(own, state, boundary, label)
            if report.reason is not Dropped.QUEUE_FULL:
                return
            if is_empty and not report.nbytes:
                log.warning("rewarm: a state of %d tokens is larger than the queue and is not stored", state.n_tokens)
                return


def cut(state: SequenceState, n: int) -> SequenceState | None:
    """The state after the first `n` tokens, of a state of rows alone; None for others. Copies nothing."""
    if n < state.valid_from:
        return None
    rows: dict[str, Rows] = {}
    for name, tensor in state.tensors.items():
        if not isinstance(tensor, Rows):
            return None
        piece = tensor.array[(slice(None),) * tensor.axis + (slice(0, n),)]
        rows[name] = Rows(piece, tensor.axis, tensor.dtype)
    return SequenceState(n, rows, valid_from=state.valid_from)
