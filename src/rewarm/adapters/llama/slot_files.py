"""A slot's state between the running server and `SequenceState`: the save and restore actions, by raw files.

Knows the codec and the raw folder; not the store, and not who uses a slot.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rewarm.adapters.llama import codec, slot_file
from rewarm.adapters.llama.codec import CodecState, UnknownLayout
from rewarm.adapters.llama.engine import Engine, Refused
from rewarm.adapters.llama.raw_folder import RawFolder
from rewarm.adapters.llama.slot_parts import Piece, SlotFile
from rewarm.adapters.llama.slots import Tokens
from rewarm.state.sequence import SequenceState

log = logging.getLogger(__name__)

ACTION_TIMEOUT_S = 600.0
"""A save waits for the decode step in progress, and writes all of the slot."""


class NoRoom(Exception):
    """The raw folder has no room for a slot's state now."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """A slot file that the server has written.

    Attributes:
        name: in the raw folder.
        n_tokens: of the slot.
        nbytes: of the file.
        stall_s: for how long the server stood still.
    """

    name: str
    n_tokens: int
    nbytes: int
    stall_s: float


class SlotFiles:
    """Saves and restores slots of a server.

    Args:
        engine: the server.
        raw: the folder that it saves to.
        n_swa: the model's sliding window in tokens; 0 without one.
        whole: why files are kept whole, and never looked into; "" when they are.

    Attributes:
        n_swa: the model's sliding window.
        n_streams: streams of the server's cache, as its slot files tell.
        nbytes_per_token: of a slot's file, as far as that is known.
        has_checkpoints: whether the build writes its restore points into slot files, and reads them.
    """

    def __init__(self, engine: Engine, raw: RawFolder, n_swa: int, whole: str = "") -> None:
        self._whole = whole
        self.n_streams = 1
        self.has_checkpoints = True
        self._least = (0, 0)
        self.nbytes_per_token = 0.0
        self._engine = engine
        self._raw = raw
        self.n_swa = n_swa
        self._told: set[str] = set()

    def save(self, slot_id: int, n_tokens: int) -> RawFile:
        """Have the server write a slot of some `n_tokens` to the raw folder.

        Raises:
            NoRoom: the folder is too small for it now.
            EngineGone, Refused: the server did not.
        """
        if not self._raw.has_room(self._least[1] + int(n_tokens * self.nbytes_per_token)):
            raise NoRoom
        name = self._raw.new_name()
        start = time.perf_counter()
        try:
            answer = self._engine.ask(
                "POST", f"/slots/{slot_id}?action=save", {"filename": name}, timeout_s=ACTION_TIMEOUT_S
            )
            stall_s = float(answer.get("timings", {}).get("save_ms", 0.0)) / 1000 or time.perf_counter() - start
            return RawFile(name, int(answer["n_saved"]), int(answer["n_written"]), stall_s)
        except BaseException:
            self._raw.remove(name)
            raise

    def read(self, file: RawFile) -> CodecState | None:
        """The states in a raw file, which is removed; None when it holds none that are usable."""
        try:
            return self._read(self._raw.path / file.name, file)
        except (OSError, ValueError, UnknownLayout) as error:
            self._tell(f"a slot that the server saved cannot be read: {error}")
            return None
        finally:
            self._raw.remove(file.name)

    def look(self, file: RawFile) -> tuple[SlotFile, CodecState]:
        """The raw file of a few tokens as it is, and its states; the file is removed. Notes streams and size.

        Raises:
            UnknownLayout: it is not understood.
            OSError: it cannot be read.
        """
        try:
            if self._whole:
                raise UnknownLayout(self._whole)
            found = slot_file.parse(memoryview((self._raw.path / file.name).read_bytes()))
            states = codec.to_state(found, self.n_swa)
            self.n_streams = states.n_streams
            self.has_checkpoints = found.checkpoints is not None
            self._least = (file.n_tokens, file.nbytes)
            return found, states
        finally:
            self._raw.remove(file.name)

    def restore(self, slot_id: int, state: SequenceState, tokens: Tokens) -> None:
        """Put a state of `tokens` into a slot.

        Raises:
            NoRoom: the folder is too small for it now; the slot is as it was.
            UnknownLayout: the state cannot become a slot file; the slot is as it was.
            EngineGone, Refused: the server did not take it; the slot may be empty.
        """
        pieces = self._pieces(state, tokens)
        if not self._raw.has_room(sum(len(piece) for piece in pieces)):
            raise NoRoom
        name = self._raw.new_name()
        try:
            self._raw.write(name, pieces)
            answer = self._engine.ask(
                "POST", f"/slots/{slot_id}?action=restore", {"filename": name}, timeout_s=ACTION_TIMEOUT_S
            )
        finally:
            self._raw.remove(name)
        if int(answer.get("n_restored", -1)) != len(tokens):
            raise Refused(f"{answer.get('n_restored')} tokens were restored instead of {len(tokens)}")

    def erase(self, slot_id: int) -> None:
        """Empty a slot.

        Raises:
            EngineGone, Refused: the server did not.
        """
        self._engine.ask("POST", f"/slots/{slot_id}?action=erase", {}, timeout_s=ACTION_TIMEOUT_S)

    def _pieces(self, state: SequenceState, tokens: Tokens) -> Sequence[Piece]:
        whole = codec.whole_file(state)
        if whole is not None:
            return [whole]
        return codec.from_state(state, tokens, n_streams=self.n_streams, with_checkpoints=self.has_checkpoints)

    def _read(self, path: Path, file: RawFile) -> CodecState | None:
        with path.open("rb") as stream:
            data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        if len(data) < file.nbytes:
            self._tell(f"a slot file has {len(data)} bytes where the server says {file.nbytes}; it is not stored")
            return None
        n_least, nbytes_least = self._least
        if file.n_tokens > n_least:
            # A recurrent state is large and does not grow: what grows is counted apart.
            growth = (len(data) - nbytes_least) / (file.n_tokens - n_least)
            self.nbytes_per_token = max(self.nbytes_per_token, growth)
        try:
            if self._whole:
                raise UnknownLayout(self._whole)
            slot = slot_file.parse(data)
            return codec.to_state(slot, self.n_swa) if len(slot.tokens) else None
        except UnknownLayout as error:
            self._tell(f"this model's slot files are kept whole, usable at their own length only: {error}")
        tokens = slot_file.parse_tokens(data).astype(np.int64)
        # Media need their descriptions, which are read with the state only.
        plain = len(tokens) > 0 and bool((tokens >= 0).all())
        return CodecState(tokens, codec.opaque_state(data, len(tokens))) if plain else None

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning("rewarm: %s", what)
