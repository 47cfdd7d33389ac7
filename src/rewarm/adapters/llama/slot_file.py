"""Slot files of llama-server: bytes to dataclasses and back, byte for byte.

Knows the layout of a file that `POST /slots/0?action=save` writes, and nothing else: no tokens' meaning,
no model, no store, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewarm.errors import EngineError

Ints = npt.NDArray[np.int32]


class UnknownLayout(EngineError):
    """A slot file that is damaged, or of a layout that is not known here. It must not reach a server."""


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One tensor of one layer, over the cells of one stream.

    Attributes:
        ggml_type: ggml's number of the element type.
        row_nbytes: bytes of one cell's row; of one element when transposed.
        n_columns: elements of one cell when transposed (the data is (n_columns, cells)); else 0.
        data: a view of the file.
    """

    ggml_type: int
    row_nbytes: int
    n_columns: int
    data: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The cells of one stream of an attention section.

    Attributes:
        positions: (cells,), in the order of the file.
        extended: (cells, 3): x, y and token of each cell, for models with positions of several axes; or None.
        seq_ids: (cells,).
        v_trans: whether the values are transposed.
        rotations: `(n_rot_k, n_rot_v)`, in files of version 4; else None.
        keys: one for each layer.
        values: one for each layer; none for MLA.
    """

    positions: Ints
    extended: Ints | None
    seq_ids: Ints
    v_trans: int
    rotations: tuple[int, int] | None
    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KvSection:
    """An attention cache. A stream without cells is None."""

    streams: tuple[Stream | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentSection:
    """A recurrent cache: for one sequence a single cell, the state after its position."""

    positions: Ints
    s_trans: int
    r: tuple[Plane, ...]
    s: tuple[Plane, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The sections of a sequence's state: base, sliding window, recurrent, in that order, those that are there."""

    base: KvSection | None
    swa: KvSection | None
    recurrent: RecurrentSection | None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One of the server's own restore points.

    Attributes:
        n_tokens: the length that it belongs to.
        pos_min: first position that the target's memory holds.
        pos_max: last one.
        target: the partial state: magic, sequence id, memory; see `parse_partial`.
        draft: of the draft model; empty without one.
        spec: of the speculation; empty without one.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    target: memoryview
    draft: memoryview
    spec: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """A run of tokens that stands for an image or a sound.

    Attributes:
        index: where its run begins in the tokens; the run's tokens are -1.
        chunk: the server's own bytes of the chunk: identity, size, positions.
    """

    index: int
    chunk: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class SlotFile:
    """A whole slot file.

    Attributes:
        version: 3 or 4.
        tokens: (n,) the conversation's token ids; -1 for each token of a media chunk.
        wrapped: whether the token list has the server's header (b11549) or is plain (older builds).
        media: by index.
        memory: the state.
        checkpoints: in the order of the file; None when the file has no such appendix.
    """

    version: int
    tokens: Ints
    wrapped: bool
    media: tuple[Media, ...]
    memory: Memory
    checkpoints: tuple[Checkpoint, ...] | None


def parse(data: memoryview) -> SlotFile:
    """Take a slot file apart; the parts are views of `data`.

    Raises:
        UnknownLayout: magic, version or a section is not known, or the file does not end where its layout says.
    """
    raise NotImplementedError


def parse_partial(data: memoryview, version: int) -> Memory:
    """Take a checkpoint's target apart: what of a model's memory cannot be cut.

    Raises:
        UnknownLayout: as `parse`.
    """
    raise NotImplementedError


def write(slot: SlotFile) -> list[bytes | memoryview]:
    """The pieces of a slot file, to be written one after the other. `write(parse(data))` is `data`."""
    raise NotImplementedError


def write_partial(memory: Memory, version: int, seq_id: int = 0) -> bytes:
    """The target of a checkpoint."""
    raise NotImplementedError
