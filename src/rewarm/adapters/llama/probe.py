"""A look at an engine that has just been started: what its slot files hold, and so what can be cached.

Has it evaluate a few tokens in slot 0, which is empty then, and saves that slot. Knows no store and no requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rewarm.adapters.llama.codec import CodecState, UnknownLayout
from rewarm.adapters.llama.engine import Engine, EngineGone, Program, Refused
from rewarm.adapters.llama.identity import Before, Resolved
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.slot_files import NoRoom, SlotFiles
from rewarm.adapters.llama.slot_parts import SlotFile
from rewarm.adapters.llama.slots import SlotPool
from rewarm.cache.epochs import PROBE_TOKENS
from rewarm.cache.identity import Identity
from rewarm.errors import EngineError
from rewarm.state.reason import Reason
from rewarm.state.sequence import SequenceState

log = logging.getLogger(__name__)

_IDENTITY_WAIT_S = 5.0
"""At the start, before any request: how long to wait for the weights' hash."""

_PROBE_TOKENS = [1, 2]
"""Any two: every vocabulary has them."""

_LONGER_PROBE_TOKENS = [1, 2] * 80
"""As many as make a server note a restore point."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a slot file of two tokens tells.

    Attributes:
        cut_anywhere: whether the model's states may be cut at any token.
        flash_attention: "on" or "off"; "" where it does not tell.
        why_not: why what is restored would be of no use to this build; "" when it is.
    """

    cut_anywhere: bool
    flash_attention: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A running engine, as far as a cache needs to know it.

    Attributes:
        pool: its slots.
        why_not: why nothing can be cached; the reason `HIT` when it can.
        files: saves and restores its slots; None where nothing can be cached.
        before: the model's files, as they were before it read them.
        identity: of the model.
        cut_anywhere: whether the model's states may be cut at any token.
        n_ctx: tokens that one slot holds.
    """

    pool: SlotPool
    why_not: tuple[Reason, str] = (Reason.HIT, "")
    files: SlotFiles | None = None
    before: Before | None = None
    identity: Identity | None = None
    cut_anywhere: bool = True
    n_ctx: int = 0


class Prober:
    """Looks at engines as they are started.

    Args:
        engine: the running server.
        program: what runs.
        raw: the folder for slot files; None where slots are not ours to save.
    """

    def __init__(self, engine: Engine, program: Program, raw: RawFolder | None) -> None:
        self._engine = engine
        self._program = program
        self._raw = raw

    def open(self, before: Before | None, why_not: tuple[Reason, str]) -> Opened:
        """Look at the engine that has just been started."""
        props = self._engine.ask("GET", "/props")
        pool = SlotPool(max(1, int(props.get("total_slots", 1))))
        if before is None or self._raw is None:
            return Opened(pool, why_not)
        whole = "is one of ik_llama.cpp, which has a layout of its own" if self._program.is_fork else ""
        files = SlotFiles(self._engine, self._raw, before.facts.n_swa, whole)
        try:
            probed = self._probe(files)
        except (Refused, NoRoom, OSError, KeyError) as error:
            if isinstance(error, EngineGone):
                raise
            why = f"This server cannot save its slots, so requests are served uncached: {error or 'no room'}"
            log.warning("rewarm: %s", why)
            return Opened(pool, (Reason.DISABLED, why))
        if probed.why_not:
            log.warning("rewarm: %s", probed.why_not)
            return Opened(pool, (Reason.DISABLED, probed.why_not))
        pool.cut_anywhere = probed.cut_anywhere
        n_ctx = int(props.get("default_generation_settings", {}).get("n_ctx", 0)) or before.facts.n_ctx_train
        resolved = Resolved(self._build(props), probed.flash_attention, n_ctx)
        identity = before.identity(resolved)
        if not before.unchanged():
            return Opened(pool, (Reason.UNAVAILABLE, "The model's files changed while they were being loaded."))
        identity.wait(_IDENTITY_WAIT_S)
        return Opened(pool, (Reason.HIT, ""), files, before, identity, probed.cut_anywhere, n_ctx)

    def states(self, files: SlotFiles) -> list[SequenceState]:
        """What tells this build from others: the state of some tokens, evaluated at once and in two pieces."""
        found = []
        try:
            for cut in (0, len(PROBE_TOKENS) // 3):
                for n in (cut, len(PROBE_TOKENS)):
                    wanted = {"prompt": list(PROBE_TOKENS[:n]), "n_predict": 1, "id_slot": 0}
                    if n:
                        self._engine.ask("POST", "/completion", {**wanted, "cache_prompt": n > cut > 0})
                found.append(files.look(files.save(0, len(PROBE_TOKENS)))[1].state)
        except UnknownLayout as error:
            raise EngineError(f"slot files of this model are kept whole: {error}") from None
        finally:
            files.erase(0)
        return found

    def _build(self, props: dict[str, Any]) -> str:
        return self._program.version or f"llama-server {props.get('build_info', '')}"

    def _probe(self, files: SlotFiles) -> Probed:
        """Have a few tokens evaluated and their slot saved, and look at the file."""
        try:
            found, states = self._saved(files, _PROBE_TOKENS)
            if found.memory.swa is not None:
                # Small states come without restore points, whatever the build.
                found, states = self._saved(files, _LONGER_PROBE_TOKENS)
        except UnknownLayout as error:
            log.warning("rewarm: slot files of this model are kept whole, usable at their own length only: %s", error)
            return Probed(cut_anywhere=False, flash_attention="")
        finally:
            files.erase(0)
        base = found.memory.base
        stream = next((s for s in base.streams if s is not None), None) if base is not None else None
        attention = "" if stream is None or not stream.values else ("off" if stream.v_trans else "on")
        why_not = ""
        if found.memory.swa is not None and not files.has_checkpoints:
            why_not = (
                "This model has a sliding window, and this llama-server keeps no restore points in slot files "
                "(builds from b11549 on do): it would evaluate everything again; requests are served uncached."
            )
        return Probed(states.state.layout().rows_only, attention, why_not)

    def _saved(self, files: SlotFiles, tokens: list[int]) -> tuple[SlotFile, CodecState]:
        """The slot file of some tokens, and its states."""
        wanted = {"prompt": tokens, "n_predict": 1, "id_slot": 0, "cache_prompt": False}
        self._engine.ask("POST", "/completion", wanted)
        return files.look(files.save(0, len(tokens)))
