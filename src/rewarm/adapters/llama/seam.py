"""The seam in llama-server: what is restored into a slot before a request, and what its end leaves behind.

One `Tier` belongs to one engine process and one cache. Saving is `slot_saver`'s. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from rewarm.adapters.asked import Asked, Mode
from rewarm.adapters.llama.codec import UnknownLayout
from rewarm.adapters.llama.engine import Engine, EngineGone, Refused
from rewarm.adapters.llama.prompts import Prompt, uncached
from rewarm.adapters.llama.slot_files import NoRoom
from rewarm.adapters.llama.slot_saver import SlotSaver, Stored
from rewarm.adapters.llama.slots import NO_TOKENS, Point, Slot, SlotPool, Tokens, n_common
from rewarm.adapters.llama.turns import Turn
from rewarm.adapters.reports import explain
from rewarm.adapters.worth import ENOUGH_TOKENS, Worth
from rewarm.cache.namespace import Match
from rewarm.state.reason import Reason
from rewarm.state.sequence import SequenceState
from rewarm.store.forgotten import Forgotten

log = logging.getLogger(__name__)

_MIN_DEADLINE_S = 1.0
_MAX_DEADLINE_S = 30.0
_MAX_PREFILL_S = 3600.0
_MIN_MORE_TOKENS = 16
"""That a restore must save: what all prompts of a template begin with is not worth one."""

_MIN_SYSTEM_TOKENS = 64
"""Shorter system prompts are not worth a request of their own."""

FORGOTTEN = "What it holds has been forgotten"
OFF = "What it holds is of a request that asked for no cache"
ERASED_AT_ONCE = (FORGOTTEN, OFF)
"""Taints of slots that are not left for anybody to see."""


class Tier:
    """The cache of one engine process. Safe to use from several threads.

    Args:
        engine: the running server.
        pool: its slots.
        stored: what to store with; None for a server that is served uncached.
        why_not: why that is so.

    Attributes:
        n_ineffective: restores that the server made no use of.
        saver: saves slots; None where nothing is cached.
    """

    def __init__(
        self, engine: Engine, pool: SlotPool, stored: Stored | None, why_not: tuple[Reason, str] = (Reason.HIT, "")
    ) -> None:
        self.n_ineffective = 0
        self.why_not = why_not
        self.pool = pool
        self.saver = None if stored is None else SlotSaver(pool, stored)
        self._engine = engine
        self._stored = stored
        self._worth = Worth()

    @property
    def is_cached(self) -> bool:
        """Whether anything is restored and saved at all."""
        return self._stored is not None

    @property
    def is_settled(self) -> bool:
        """Whether all raw files have been taken apart."""
        return self.saver is None or self.saver.is_settled

    def stats(self) -> dict[str, Any]:
        """What saving and restoring have cost and given, for people and programs."""
        saves = {} if self.saver is None else asdict(self.saver.totals)
        return {"saves": saves, "ineffective_restores": self.n_ineffective}

    # A request.

    def begin(self, prompt: Prompt, wanted: int | None = None, asked: Asked | None = None) -> Turn:
        """Hold a slot for a prompt, with as much of it as there is.

        Args:
            prompt: of the request.
            wanted: the slot that the client asks for.
            asked: what the request may do with the cache.

        Raises:
            EngineGone: the engine ended.
        """
        stored, start = self._stored, time.perf_counter()
        asked = asked or Asked()
        if stored is None:
            return Turn(prompt, asked, reason=self.why_not[0], detail=self.why_not[1])
        if asked.mode is Mode.OFF:
            prompt = uncached("The request asks for no cache (X-Rewarm-Cache is off).", OFF)
        elif self.saver is not None and self.saver.is_void and prompt.why_not is Reason.HIT:
            prompt = replace(prompt, why_not=Reason.DISABLED, detail="The LoRA scales were changed while it ran.")
        if prompt.why_not is not Reason.HIT:
            slot = self.pool.take(NO_TOKENS, 0, wanted, tenant=asked.tenant)
            turn = self._turn(prompt, asked, slot, (prompt.why_not, prompt.detail))
            return self._holding(turn, lambda: self._clear(turn, slot))
        if len(prompt.tokens) >= stored.n_ctx:
            return Turn(prompt, asked, reason=Reason.DISABLED, detail="The prompt does not fit into the context.")
        if stored.policy.paused:
            match = Match(0, Reason.DISABLED)
            detail = "The cache is paused: nothing is read or written."
        else:
            match = stored.space(asked.tenant).find(prompt.tokens)
            detail = explain(match.reason, match.detail)
        slot = self.pool.take(prompt.tokens, match.n_tokens, wanted, tenant=asked.tenant)
        turn = self._turn(prompt, asked, slot, (match.reason, detail))
        turn.keeps = asked.mode is Mode.ON and match.reason is not Reason.DISABLED
        self._holding(turn, lambda: self._prepare(stored, turn, slot, match))
        turn.restore_s = time.perf_counter() - start
        if not stored.cut_anywhere and turn.keeps:
            self._holding(turn, lambda: self._stop_at_system_end(turn, slot))
        return turn

    def _turn(self, prompt: Prompt, asked: Asked, slot: Slot, why: tuple[Reason, str]) -> Turn:
        if self._worth.prefill_s(1) is None and self._stored is not None:
            self._worth.begin_with(self._stored.cache.prefill_s(self._stored.identity, 1))
        turn = Turn(prompt, asked, slot, reason=why[0], detail=why[1], token_s=self._worth.prefill_s(1) or 0.0)
        saver = self.saver
        if saver is not None:
            turn.stalled = lambda: saver.stalled(asked.at, slot)
        return turn

    def end(self, turn: Turn) -> None:
        """Give the slot of a request back; what it holds now waits to be saved."""
        slot = turn.slot
        if slot is None:
            return
        if turn.sent and turn.status in (0, 200):
            self._left_behind(turn, slot)
            self._learn(turn)
        if turn.sent and turn.asked.mode is Mode.OFF:
            # Before anybody else can have the slot.
            try:
                self._erase(slot)
            except EngineGone:
                slot.forget()
        self.pool.release(slot)

    def _left_behind(self, turn: Turn, slot: Slot) -> None:
        """Note what a request left in its slot. One that was broken off leaves a part; the slot's file tells which."""
        prompt = turn.prompt
        slot.version += 1
        known = len(prompt.tokens) > 0 and prompt.why_not is Reason.HIT
        n_same = n_common(slot.live, prompt.tokens) if known else 0
        slot.points = tuple(self._point(point.n_tokens) for point in slot.points if point.n_tokens <= n_same)
        slot.live = prompt.tokens if known else NO_TOKENS
        slot.n_system, slot.label = prompt.n_system, turn.asked.label
        forgotten = slot.tainted == FORGOTTEN
        slot.dirty = known and not forgotten and turn.keeps
        slot.tainted = (
            FORGOTTEN if forgotten else prompt.taint or ("The reply ran out of context" if turn.truncated else "")
        )

    def _point(self, n_tokens: int) -> Point:
        """A restore point of a slot whose file has not been looked into yet.

        Where the server goes on at a point it replaces it by one of its own, which has no more than the window:
        of a prompt that leaves the slot right there, it says that the window does not reach far enough.
        """
        has_window = self._stored is not None and self._stored.files.n_swa > 0
        return Point(n_tokens, n_tokens + has_window)

    def _holding(self, turn: Turn, prepare: Callable[[], None]) -> Turn:
        try:
            prepare()
        except BaseException:
            if turn.slot is not None:
                self.pool.release(turn.slot)
            raise
        return turn

    def _prepare(self, stored: Stored, turn: Turn, slot: Slot, match: Match) -> None:
        tokens = turn.prompt.tokens
        self._make_ones_own(turn, slot)
        if stored.files.n_streams == 1 and len(self.pool) > 1:
            self._look_whether_purged(slot)
        n_live = slot.usable(tokens, stored.cut_anywhere)
        turn.n_memory = n_live
        if n_common(slot.live, tokens) < len(slot.live) or not turn.keeps:
            # What it holds besides is lost now; it is saved if that has not been done.
            self.save(slot)
        n_more = match.n_tokens - n_live
        if n_more > 0:
            always = stored.policy.load == "always"
            if n_more < _MIN_MORE_TOKENS and not always:
                turn.reason, turn.detail = Reason.TOO_SHORT, "What is stored is too short to be worth loading."
            elif not always and not self._worth.is_worth(n_more, match.nbytes):
                turn.reason, turn.detail = Reason.NOT_WORTH_LOADING, explain(Reason.NOT_WORTH_LOADING, {})
            else:
                self._load(stored, turn, slot, match)
        else:
            stored.cache.touch(match)

    def _make_ones_own(self, turn: Turn, slot: Slot) -> None:
        """Erase what is not to be reused: a tainted slot, or another tenant's, which is saved for that one first."""
        if slot.tenant != turn.asked.tenant:
            self.save(slot)
            if not self._erase(slot):
                turn.from_scratch = True
                slot.forget()
            slot.tenant = turn.asked.tenant
        elif slot.tainted and not self._erase(slot):
            turn.from_scratch = True
            slot.forget()

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
        state = stored.space(turn.asked.tenant).restore(match, deadline=deadline)
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
            # A build may leave in the slot what it had read by then.
            if not self._erase(slot):
                turn.from_scratch = True
                slot.forget()
            turn.n_memory = 0
            turn.reason, turn.detail = Reason.BUSY, f"The server did not take the stored state: {error}"
        else:
            slot.forget()
            slot.live, slot.points = tokens, (self._point(state.n_tokens),)
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
        slot.live, slot.n_system, slot.dirty = tokens[:n], n, True
        slot.points = (self._point(n),)
        self.save(slot)

    def _learn(self, turn: Turn) -> None:
        timings = turn.timings
        cached, evaluated = int(timings.get("cache_n", 0)), int(timings.get("prompt_n", 0))
        prompt_s = float(timings.get("prompt_ms", 0.0)) / 1000
        self._worth.prefilled(evaluated, prompt_s)
        if self._stored is not None and evaluated >= ENOUGH_TOKENS:
            self._stored.cache.note_prefill(self._stored.identity, evaluated, prompt_s)
        if timings and turn.n_disk and cached < turn.n_disk:
            self.n_ineffective += 1
            log.warning(
                "rewarm: the server used %d of %d tokens that were restored (the %s such restore)",
                cached,
                turn.n_disk,
                f"{self.n_ineffective}.",
            )
        if turn.n_disk and self._stored is not None:
            self._stored.cache.count_saved(turn.saved_s())
        n = len(turn.prompt.tokens)
        if timings and n and turn.prompt.why_not is Reason.HIT and cached + evaluated != n:
            log.warning("rewarm: the server counted %d prompt tokens, not %d", cached + evaluated, n)

    # Slots that others use.

    def before_unpinned(self, asked: Asked) -> None:
        """A request is about to run in slots that the server chooses: save what it may overwrite.

        One that may not see what slots hold of others, or is not to be seen by them, finds them empty.
        """
        if self.saver is None:
            return
        self.saver.save_idle()
        if asked.mode is Mode.OFF or asked.tenant:
            self._erase_idle(lambda slot: asked.mode is Mode.OFF or slot.tenant != asked.tenant, asked.tenant)
        if asked.mode is Mode.OFF:
            # Whoever takes such a slot from now on erases it first.
            self.pool.forget_idle(OFF, asked.tenant)

    def after_unpinned(self, asked: Asked, taint: str) -> None:
        """Such a request has run: nothing is known of idle slots; with `taint` they are not to be reused."""
        if self._stored is not None:
            self.pool.forget_idle(OFF if asked.mode is Mode.OFF else taint, asked.tenant)
            if asked.mode is Mode.OFF:
                self.erase_tainted()

    def wipe(self, slot_ids: Iterable[int]) -> None:
        """Overwrite slots of a server that is served uncached, and has no erase action for that."""
        for number in slot_ids:
            try:
                wanted = {"prompt": [0], "n_predict": 0, "id_slot": number, "cache_prompt": False}
                self._engine.ask("POST", "/completion", wanted)
            except Refused as error:
                log.warning("rewarm: slot %d could not be overwritten: %s", number, error)

    def identity_changed(self) -> None:
        """The server computes under another identity from now on: nothing more is restored or saved."""
        if self.saver is not None:
            self.saver.is_void = True
        self.pool.forget_all(taint="The LoRA scales were changed while it ran")

    # Forgetting.

    def forget(self, keys: Forgotten) -> None:
        """A conversation has been forgotten: what slots hold of it is not saved, and `erase_tainted` erases it."""
        stored = self._stored
        if stored is None or self.saver is None:
            return
        self.saver.forgets.append(keys)
        for slot in self.pool.all():
            version, live = slot.version, slot.live
            if len(live) and stored.space(slot.tenant or b"").holds_any(keys, live):
                self.pool.taint(slot, version, FORGOTTEN)

    def erase_tainted(self) -> None:
        """Erase the idle slots that hold something which is not left for anybody to see."""
        for slot in self.pool.all():
            if slot.tainted in ERASED_AT_ONCE:
                with self.pool.saving(slot) as free:
                    if free:
                        self._erase(slot)

    # Slots.

    def save(self, slot: Slot) -> None:
        """Have the server write a slot that the caller holds, if it has something new."""
        if self.saver is not None:
            self.saver.save(slot)

    def _erase_idle(self, whether: Callable[[Slot], bool], tenant: bytes) -> None:
        for slot in self.pool.all():
            with self.pool.saving(slot) as free:
                if free and whether(slot) and self._erase(slot):
                    slot.tenant = tenant

    def _clear(self, turn: Turn, slot: Slot) -> None:
        """Before a request that is served uncached: what the slot holds is saved, and of no further use."""
        self.save(slot)
        self._make_ones_own(turn, slot)
        if turn.asked.mode is Mode.OFF:
            turn.from_scratch = True
        slot.forget()

    def _erase(self, slot: Slot) -> bool:
        """Empty a slot that the caller holds; whether that was done."""
        if self._stored is None:
            return False
        try:
            self._stored.files.erase(slot.id)
        except Refused as error:
            log.warning("rewarm: the server did not erase slot %d: %s", slot.id, error)
            return False
        slot.forget()
        return True
