"""The parts of a slot file as plain dataclasses, with the numbers of ggml and llama.cpp that they need.

`slot_file` reads and writes them; nothing here knows bytes' order, models or the store.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewarm.errors import EngineError

Ints = npt.NDArray[np.int32]
Piece = bytes | memoryview


class UnknownLayout(EngineError):
    """A slot file that is damaged, or of a layout that is not known here. It must not reach a server."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """A ggml type: its name, and the bytes of a block of `block` elements."""

    name: str
    block: int
    nbytes: int


TYPES = {
    0: ElementType("f32", 1, 4),
    1: ElementType("f16", 1, 2),
    2: ElementType("q4_0", 32, 18),
    3: ElementType("q4_1", 32, 20),
    6: ElementType("q5_0", 32, 22),
    7: ElementType("q5_1", 32, 24),
    8: ElementType("q8_0", 32, 34),
    20: ElementType("iq4_nl", 32, 18),
    30: ElementType("bf16", 1, 2),
}
"""The types that llama-server keeps states in, by ggml's numbers."""

NUMBERS = {element.name: number for number, element in TYPES.items()}
"""ggml's numbers by the types' names."""


@dataclass(frozen=True, slots=True, eq=False)
class Plane:
    """One tensor of one layer, over the cells of one stream.

    Attributes:
        ggml_type: ggml's number of the element type; a key of `TYPES`.
        row_nbytes: bytes of one cell's row; of one element when transposed.
        n_columns: elements of one cell when transposed (the data is (n_columns, cells)); else 0.
        data: a view of the file.
    """

    ggml_type: int
    row_nbytes: int
    n_columns: int
    data: Piece


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """The cells of one stream of an attention section.

    Attributes:
        positions: (cells,), in the order of the file.
        extended: (cells, 3): x, y and token of each cell, for models with positions of several axes; or None.
        seq_ids: (cells,).
        v_trans: whether the values are transposed, 0 or 1.
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
    """A recurrent cache: for one sequence a single cell, the state after its position.

    Attributes:
        positions: (cells,).
        n_layers: of the model, those without a recurrent state included.
        r: one for each recurrent layer.
        s: one for each recurrent layer; its rows may be empty.
    """

    positions: Ints
    n_layers: int
    r: tuple[Plane, ...]
    s: tuple[Plane, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The sections of a sequence's state, those that are there, in the file's order."""

    base: KvSection | None = None
    swa: KvSection | None = None
    recurrent: RecurrentSection | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """One of the server's own restore points.

    Attributes:
        n_tokens: the length that it belongs to.
        pos_min: first position that the target's memory holds, as the server's gate sees it.
        pos_max: last one.
        target: the partial state: magic, sequence id, memory; see `parse_partial`.
        draft: of the draft model; empty without one.
        spec: of the speculation; empty without one.
    """

    n_tokens: int
    pos_min: int
    pos_max: int
    target: Piece
    draft: Piece = b""
    spec: Piece = b""


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """A run of tokens that stands for an image or a sound.

    Attributes:
        index: where its run begins in the tokens; each of the run's tokens is -1.
        chunk: the server's own description of it: identity, size, positions; no pixels.
    """

    index: int
    chunk: Piece


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
