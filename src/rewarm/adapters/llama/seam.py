"""The seam in llama-server: what is restored into a slot before a request, and saved out of it afterwards.

One `Tier` belongs to one engine process. A slot is saved only if all its cells were computed for exactly its
token list under one identity; the slot file's own list says which tokens these are. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from rewarm.adapters.llama.codec import CodecState, UnknownLayout
from rewarm.adapters.llama.engine import Engine, EngineGone, Refused
from rewarm.adapters.llama.identity import Before
from rewarm.adapters.llama.prompts import Prompt
from rewarm.adapters.llama.slot_files import NoRoom, RawFile, SlotFiles
from rewarm.adapters.llama.slots import NO_TOKENS, Slot, SlotPool, Tokens, n_common
from rewarm.adapters.llama.worth import Worth
from rewarm.adapters.reports import Report, explain
from rewarm.cache.identity import Identity
from rewarm.cache.namespace import Match, Namespace
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Reason
from rewarm.state.sequence import Rows, SequenceState
from rewarm.store.forgotten import Forgotten

log = logging.getLogger(__name__)

_MIN_DEADLINE_S = 1.0
_MAX_DEADLINE_S = 30.0
_MIN_MORE_TOKENS = 16
"""That a restore must save: what all prompts of a template begin with is not worth one."""

_REPLY_TOKENS = 1024
"""Allowed for in the room that a save needs: the reply's length is not known before."""

FORGOTTEN = "What it holds has been forgotten"
"""The taint of a slot that is to be erased at once."""

_MIN_SYSTEM_TOKENS = 64
"""Shorter system prompts are not worth a request of their own."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request on its way through the engine.

    Attributes:
        prompt: of the request.
        slot: held for it; None where the server chooses.
        n_disk: tokens that were restored for it.
        n_memory: tokens that the slot held before.
        n_ours: tokens that were evaluated for it by a request of our own: not reused.
        reason: why not more.
        detail: the same as a sentence.
        restore_s: seconds spent on finding and restoring.
        sent: whether the engine has been asked.
        status: of the engine's answer; 0 before there is one.
        timings: the engine's own, from the end of the reply.
        truncated: whether the reply ran out of context.
    """

    prompt: Prompt
    slot: Slot | None = None
    n_disk: int = 0
    n_memory: int = 0
    n_ours: int = 0
    reason: Reason = Reason.NOTHING_STORED
    detail: str = ""
    restore_s: float = 0.0
    sent: bool = False
    status: int = 0
    timings: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False

    def report(self) -> Report:
        """What the cache did, by the engine's own count of what it reused."""
        found = int(self.timings.get("cache_n", 0))
        n_prompt = found + int(self.timings.get("prompt_n", 0)) or len(self.prompt.tokens)
        cached = max(0, found - self.n_ours)
        n_disk = min(cached, self.n_disk)
        reason, detail = self.reason, self.detail
        if self.n_disk and cached < self.n_disk:
            reason, detail = Reason.UNAVAILABLE, "The server did not use the state that was restored."
        elif cached and found >= n_prompt - 1:
            reason, detail = Reason.HIT, ""
        return Report(cached, n_disk, cached - n_disk, n_prompt, reason.value, detail, round(self.restore_s, 6))


@dataclass(frozen=True, slots=True)
class Unread:
    """A raw file that waits to be taken apart.

    Attributes:
        file: in the raw folder.
        slot: that it was saved from.
        version: the slot's at the save.
        n_prompt: tokens of the prompt that the slot last served.
        n_system: where its system prompt ends.
        n_forgets: how often conversations had been forgotten by then.
    """

    file: RawFile
    slot: Slot
    version: int
    n_prompt: int
    n_system: int
    n_forgets: int


@dataclass(frozen=True, slots=True)
class Stored:
    """What a tier stores with.

    Attributes:
        cache: the prefix cache.
        space: this model's namespace in it.
        identity: of the model.
        before: its files, as they were before the engine read them.
        files: saves and restores slots.
        cut_anywhere: whether the model's states may be cut at any token.
        n_ctx: tokens that one slot holds.
    """

    cache: PrefixCache
    space: Namespace
    identity: Identity
    before: Before
    files: SlotFiles
    cut_anywhere: bool
    n_ctx: int


class Tier:
    """The cache of one engine process. Safe to use from several threads.

    Args:
        engine: the running server.
        pool: its slots.
        stored: what to store with; None for a server that is served uncached.
        why_not: why that is so.

    Attributes:
        n_ineffective: restores that the server made no use of.
    """

    def __init__(
        self, engine: Engine, pool: SlotPool, stored: Stored | None, why_not: tuple[Reason, str] = (Reason.HIT, "")
    ) -> None:
        self.n_ineffective = 0
        self.why_not = why_not
        self.pool = pool
        self.unread: SimpleQueue[Unread | None] = SimpleQueue()
        self._engine = engine
        self._stored = stored
        self._worth = Worth()
        self._changed_identity = False
        self._reading = threading.Lock()
        self._n_unread = 0
        self._forgets: list[Forgotten] = []

    @property
    def is_cached(self) -> bool:
        """Whether anything is restored and saved at all."""
        return self._stored is not None

    @property
    def is_settled(self) -> bool:
        """Whether all raw files have been taken apart."""
        return self._n_unread == 0

    # A request.

    def begin(self, prompt: Prompt, wanted: int | None = None) -> Turn:
        """Hold a slot for a prompt, with as much of it as there is.

        Args:
            prompt: of the request.
            wanted: the slot that the client asks for.

        Raises:
            EngineGone: the engine ended.
        """
        stored, start = self._stored, time.perf_counter()
        if stored is None:
            return Turn(prompt, reason=self.why_not[0], detail=self.why_not[1])
        if self._changed_identity and prompt.why_not is Reason.HIT:
            prompt = replace(prompt, why_not=Reason.DISABLED, detail="The LoRA scales were changed while it ran.")
        if prompt.why_not is not Reason.HIT:
            slot = self.pool.take(NO_TOKENS, 0, wanted)
            turn = Turn(prompt, slot, reason=prompt.why_not, detail=prompt.detail)
            return self._holding(turn, lambda: self._clear(slot))
        if len(prompt.tokens) >= stored.n_ctx:
            return Turn(prompt, reason=Reason.DISABLED, detail="The prompt does not fit into the context.")
        match = stored.space.find(prompt.tokens)
        slot = self.pool.take(prompt.tokens, match.n_tokens, wanted)
        turn = Turn(prompt, slot, reason=match.reason, detail=explain(match.reason, match.detail))
        self._holding(turn, lambda: self._prepare(stored, turn, slot, match))
        turn.restore_s = time.perf_counter() - start
        if not stored.cut_anywhere:
            self._holding(turn, lambda: self._stop_at_system_end(turn, slot))
        return turn

    def end(self, turn: Turn) -> None:
        """Give the slot of a request back; what it holds now waits to be saved."""
        slot = turn.slot
        if slot is None:
            return
        prompt = turn.prompt
        if turn.sent and turn.status in (0, 200):
            # A request that was broken off leaves a part of its prompt; the slot's file will tell which.
            slot.version += 1
            known = len(prompt.tokens) > 0 and prompt.why_not is Reason.HIT
            n_same = n_common(slot.live, prompt.tokens) if known else 0
            slot.points = tuple(point for point in slot.points if point <= n_same)
            slot.live = prompt.tokens if known else NO_TOKENS
            slot.n_system, slot.dirty = prompt.n_system, known
            forgotten = slot.tainted == FORGOTTEN
            slot.dirty = slot.dirty and not forgotten
            slot.tainted = (
                FORGOTTEN if forgotten else prompt.taint or ("The reply ran out of context" if turn.truncated else "")
            )
            self._learn(turn)
        self.pool.release(slot)

    def _holding(self, turn: Turn, prepare: Any) -> Turn:
        try:
            prepare()
        except BaseException:
            if turn.slot is not None:
                self.pool.release(turn.slot)
            raise
        return turn

    def _prepare(self, stored: Stored, turn: Turn, slot: Slot, match: Match) -> None:
        tokens = turn.prompt.tokens
        if slot.tainted:
            self._erase(slot)
        if stored.files.n_streams == 1 and len(self.pool) > 1:
            self._look_whether_purged(slot)
        n_live = min(slot.usable(tokens, stored.cut_anywhere), len(tokens) - 1)
        turn.n_memory = n_live
        if n_common(slot.live, tokens) < len(slot.live):
            # What it holds besides is lost now; it is saved if that has not been done.
            self.save(slot)
        n_more = match.n_tokens - n_live
        if n_more > 0:
            always = stored.cache.policy().load == "always"
            if n_more < _MIN_MORE_TOKENS and not always:
                turn.reason, turn.detail = Reason.TOO_SHORT, "What is stored is too short to be worth loading."
            elif not always and not self._worth.is_worth(n_more, match.nbytes):
                turn.reason, turn.detail = Reason.NOT_WORTH_LOADING, explain(Reason.NOT_WORTH_LOADING, {})
            else:
                self._load(stored, turn, slot, match)
        else:
            stored.cache.touch(match)

    def _look_whether_purged(self, slot: Slot) -> None:
        """Where slots share one cache, the server empties idle ones when it needs their cells."""
        if not len(slot.live):
            return
        try:
            found = self._engine.ask("GET", "/slots")
        except Refused:
            return
        if any(one.get("id") == slot.id and one.get("n_prompt_tokens") == 0 for one in found):
            slot.forget()

    def _load(self, stored: Stored, turn: Turn, slot: Slot, match: Match) -> None:
        """Restore a match into a slot; at a fault the slot is empty or as it was, and the reason told."""
        start = time.perf_counter()
        prefill_s = self._worth.prefill_s(match.n_tokens - turn.n_memory)
        deadline = min(_MAX_DEADLINE_S, max(_MIN_DEADLINE_S, prefill_s or _MAX_DEADLINE_S))
        state = stored.space.restore(match, deadline=deadline)
        if state.n_tokens < match.n_tokens:
            turn.reason, turn.detail = state.reason, explain(state.reason, {})
        if state.n_tokens <= turn.n_memory:
            return
        tokens = turn.prompt.tokens[: state.n_tokens]
        self.save(slot)
        try:
            self._restore(stored, slot, state, tokens)
        except NoRoom:
            turn.reason, turn.detail = Reason.BUSY, "There is no room for the state in the folder for slot files."
        except (OSError, UnknownLayout) as error:
            if isinstance(error, EngineGone):
                raise
            turn.reason, turn.detail = Reason.UNAVAILABLE, f"The stored state could not be handed over: {error}"
        except Refused as error:
            slot.forget()
            turn.n_memory = 0
            turn.reason, turn.detail = Reason.BUSY, f"The server did not take the stored state: {error}"
        else:
            slot.forget()
            slot.live, slot.points = tokens, (state.n_tokens,)
            turn.n_disk, turn.n_memory = state.n_tokens, 0
            self._worth.restored(match.nbytes, time.perf_counter() - start)

    def _restore(self, stored: Stored, slot: Slot, state: SequenceState, tokens: Tokens) -> None:
        """Restore a state; where slots share one cache, other idle ones give up their cells for it."""
        try:
            stored.files.restore(slot.id, state, tokens)
        except Refused:
            if stored.files.n_streams > 1 or not self._give_up_others(slot):
                raise
            stored.files.restore(slot.id, state, tokens)

    def _give_up_others(self, slot: Slot) -> bool:
        """Save and erase the other idle slots; whether there were any."""
        n_erased = 0
        self.pool.wait_for_saves(_MAX_DEADLINE_S)
        for other in self.pool.all():
            if other is not slot and len(other.live):
                with self.pool.saving(other) as free:
                    if free:
                        self.save(other)
                        self._erase(other)
                        n_erased += 1
        return n_erased > 0

    def _stop_at_system_end(self, turn: Turn, slot: Slot) -> None:
        """Prefill up to the system prompt's end and save there: other states of this model cannot be cut."""
        n, tokens = turn.prompt.n_system, turn.prompt.tokens
        if not n_common(slot.live, tokens) + _MIN_SYSTEM_TOKENS <= n < len(tokens):
            return
        self.save(slot)
        wanted = {"prompt": tokens[:n].tolist(), "n_predict": 1, "temperature": 0, "id_slot": slot.id}
        try:
            answer = self._engine.ask("POST", "/completion", {**wanted, "cache_prompt": True}, timeout_s=_MAX_PREFILL_S)
        except Refused as error:
            log.debug("the system prompt could not be evaluated by itself: %s", error)
            return
        turn.n_ours = int(answer.get("timings", {}).get("prompt_n", n))
        slot.forget()
        slot.live, slot.n_system, slot.dirty, slot.points = tokens[:n], n, True, (n,)
        self.save(slot)

    def _learn(self, turn: Turn) -> None:
        timings = turn.timings
        cached, evaluated = int(timings.get("cache_n", 0)), int(timings.get("prompt_n", 0))
        self._worth.prefilled(evaluated, float(timings.get("prompt_ms", 0.0)) / 1000)
        if timings and turn.n_disk and cached < turn.n_disk:
            self.n_ineffective += 1
            log.warning(
                "rewarm: the server used %d of %d tokens that were restored (the %s such restore)",
                cached,
                turn.n_disk,
                f"{self.n_ineffective}.",
            )
        n = len(turn.prompt.tokens)
        if timings and n and turn.prompt.why_not is Reason.HIT and cached + evaluated != n:
            log.warning("rewarm: the server counted %d prompt tokens, not %d", cached + evaluated, n)

    # Slots that others use.

    def before_unpinned(self) -> None:
        """A request is about to run in slots that the server chooses: save what it may overwrite."""
        if self._stored is not None:
            self.save_idle()

    def after_unpinned(self, taint: str) -> None:
        """Such a request has run: nothing is known of idle slots; with `taint` they are not to be reused."""
        if self._stored is not None:
            self.pool.forget_idle(taint)

    def identity_changed(self) -> None:
        """The server computes under another identity from now on: nothing more is restored or saved."""
        self._changed_identity = True
        self.pool.forget_all(taint="The LoRA scales were changed while it ran")

    # Forgetting.

    def forget(self, keys: Forgotten) -> None:
        """A conversation has been forgotten: what slots hold of it is not saved, and `erase_forgotten` erases it."""
        stored = self._stored
        if stored is None:
            return
        self._forgets.append(keys)
        for slot in self.pool.all():
            version, live = slot.version, slot.live
            if len(live) and stored.space.holds_any(keys, live):
                self.pool.taint(slot, version, FORGOTTEN)

    def erase_forgotten(self) -> None:
        """Erase the idle slots that hold something forgotten."""
        for slot in self.pool.all():
            if slot.tainted == FORGOTTEN:
                with self.pool.saving(slot) as free:
                    if free:
                        self._erase(slot)

    # Saving.

    def save_idle(self) -> int:
        """Have the server write every idle slot with something new; how many are left unsaved."""
        left = 0
        for slot in self.pool.dirty():
            with self.pool.saving(slot) as free:
                if free:
                    self.save(slot)
            left += slot.dirty
        return left

    def save(self, slot: Slot) -> None:
        """Have the server write a slot that the caller holds, if it has something new. Faults are logged."""
        stored = self._stored
        if stored is None or not slot.dirty or slot.tainted:
            return
        if stored.identity.error:
            slot.dirty = False
            return
        try:
            file = stored.files.save(slot.id, len(slot.live) + _REPLY_TOKENS)
        except NoRoom:
            log.warning("rewarm: slot %d is not saved now: the folder for slot files has no room", slot.id)
            return
        except Refused as error:
            slot.dirty = False
            log.warning("rewarm: the server did not save slot %d: %s", slot.id, error)
            return
        except EngineGone:
            slot.forget()
            return
        log.info("rewarm: slot %d saved: %d tokens, %d bytes; the server stood still for %.3f s", slot.id,
                 file.n_tokens, file.nbytes, file.stall_s)  # fmt: skip
        with self._reading:
            self._n_unread += 1
        slot.dirty = False
        self.unread.put(Unread(file, slot, slot.version, len(slot.live), slot.n_system, len(self._forgets)))

    def keep(self, unread: Unread) -> None:
        """Take a raw file apart and store what is new in it. Waits for no disk but the raw folder's."""
        try:
            if self._stored is not None:
                self._keep(self._stored, unread)
        finally:
            with self._reading:
                self._n_unread -= 1

    def _keep(self, stored: Stored, unread: Unread) -> None:
        found = stored.files.read(unread.file)
        if found is None or not found.state.n_tokens:
            return
        if self._changed_identity or not stored.before.unchanged():
            log.warning("rewarm: the model's files or scales have changed since the engine read them; not saved")
            return
        if any(stored.space.holds_any(keys, found.tokens) for keys in self._forgets[unread.n_forgets :]):
            return  # forgotten while it waited
        self._store(stored, found, unread)
        points = tuple(point.n_tokens for point in found.points)
        self.pool.learn(unread.slot, unread.version, found.tokens, points)

    def _store(self, stored: Stored, found: CodecState, unread: Unread) -> None:
        n, tokens = found.state.n_tokens, found.tokens
        for point in found.points:
            at = point.n_tokens
            stored.space.save(tokens[:at], point, Boundary.SYSTEM if at == unread.n_system else Boundary.PREFILL)
        if 0 < unread.n_system < n and stored.cut_anywhere:
            system = cut(found.state, unread.n_system)
            if system is not None:
                stored.space.save(tokens[: unread.n_system], system, Boundary.SYSTEM)
        boundary = Boundary.PREFILL if n < unread.n_prompt else Boundary.ASSISTANT
        stored.space.save(tokens, found.state, Boundary.SYSTEM if n == unread.n_system else boundary)

    def _clear(self, slot: Slot) -> None:
        """Before a request that is served uncached: what the slot holds is saved, and of no further use."""
        if slot.tainted:
            self._erase(slot)
        self.save(slot)
        slot.forget()

    def _erase(self, slot: Slot) -> None:
        if self._stored is not None:
            try:
                self._stored.files.erase(slot.id)
            except Refused as error:
                log.warning("rewarm: the server did not erase slot %d: %s", slot.id, error)
                return
        slot.forget()


_MAX_PREFILL_S = 3600.0


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
