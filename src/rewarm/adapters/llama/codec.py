"""Between llama-server's slot files and `SequenceState`, bit for bit.

Full-attention sections become rows, sliding windows windows, recurrent sections opaque tensors. Whatever
is unknown is refused with `UnknownLayout`; its file can be kept whole (`opaque_state`), usable at its own
length only. Knows no server, no files and no store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewarm.adapters.llama.slot_file import SlotFile, UnknownLayout
from rewarm.state.sequence import MetaValue, SequenceState

__all__ = ["VERSION", "CodecState", "UnknownLayout", "from_state", "opaque_state", "to_state", "whole_file"]

VERSION = 1
"""Part of every identity: raised when the same slot file gives other tensors."""


@dataclass(frozen=True, slots=True, eq=False)
class CodecState:
    """A slot file as states.

    Attributes:
        tokens: (n,) int64, for `Namespace.save` and `find`: a media chunk's tokens are negative numbers made
            from the chunk's content, so that another image is another prefix. `tokens[:k]` goes with a point at k.
        state: after all tokens.
        points: restore points from the server's checkpoints, shortest first, each complete at its own
            `n_tokens`, all below the state's; none for models whose states can be cut anywhere.
    """

    tokens: npt.NDArray[np.int64]
    state: SequenceState
    points: tuple[SequenceState, ...] = ()


def to_state(slot: SlotFile, n_swa: int = 0) -> CodecState:
    """The states that a slot file holds, as views of its bytes where that is possible.

    Args:
        slot: from `slot_file.parse`.
        n_swa: the model's sliding window in tokens (GGUF's `<arch>.attention.sliding_window`), needed for
            files with a window section: a file shorter than the window does not tell it.

    Raises:
        UnknownLayout: the cells are not exactly the token list's positions, the window section is not what
            a standard window of `n_swa` holds, or the parts do not fit each other.
    """
    raise NotImplementedError


def from_state(
    state: SequenceState, tokens: Sequence[int] | npt.NDArray[np.int64], points: Sequence[SequenceState] = ()
) -> list[bytes | memoryview]:
    """A slot file that an unmodified llama-server restores: one stream, sequence 0, at the state's own length.

    States that cannot be cut anywhere carry their own restore point as a checkpoint, as the server's gate
    demands; those of `points` are added.

    Args:
        state: from `to_state`, or from a restore.
        tokens: as many as the state covers, as in `CodecState.tokens`.
        points: restore points at shorter lengths, of the same layout.

    Returns:
        Pieces of bytes, to be written to a file one after the other.

    Raises:
        UnknownLayout: the state was not made by this codec, or `tokens` do not fit.
    """
    raise NotImplementedError


def opaque_state(data: memoryview, n_tokens: int, meta: Mapping[str, MetaValue] | None = None) -> SequenceState:
    """The fallback for an unknown layout: the whole file as one opaque tensor, usable after exactly `n_tokens`."""
    raise NotImplementedError


def whole_file(state: SequenceState) -> memoryview | None:
    """The file that `opaque_state` kept; None for any other state."""
    raise NotImplementedError
