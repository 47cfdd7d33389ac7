"""From a `SequenceState` back to a slot file: the other half of `codec`.

Knows what the names and element types that `codec.to_state` gives mean, and what the server's gate wants
to see before it reuses a state that cannot be cut. Knows no server, no files and no store.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewarm.adapters.llama import slot_file
from rewarm.adapters.llama.slot_parts import (
    NUMBERS,
    TYPES,
    Checkpoint,
    KvSection,
    Media,
    Memory,
    Piece,
    Plane,
    RecurrentSection,
    SlotFile,
    Stream,
    UnknownLayout,
)
from rewarm.state.sequence import Array, Opaque, SequenceState, Tensor, Window

MEDIA = "media."
"""Prefix in `meta` of a media chunk's description, in base64; behind it where the chunk's run begins."""

_DTYPE = re.compile(
    r"(?P<type>\w+):v(?P<version>\d+)(?P<wrapped>w?)(\.rot(?P<rot>\d+))?(\.trans(?P<trans>[01]))?(\.of(?P<of>\d+))?"
)
_NAME = re.compile(r"(?:(attn|swa)\.(?:[kv]\.\d{3}|cell)|rec\.[rs]\.\d{3})")


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A tensor's `dtype`, read; see `codec`."""

    number: int
    form: tuple[int, bool]
    rotation: int | None
    trans: int
    n_layers: int


def from_state(
    state: SequenceState,
    tokens: Sequence[int] | npt.NDArray[np.int64],
    points: Sequence[SequenceState] = (),
    n_streams: int = 1,
    *,
    with_checkpoints: bool = True,
) -> list[Piece]:
    """A slot file that an unmodified llama-server restores: sequence 0, at the state's own length.

    States that cannot be cut anywhere carry their own restore point as a checkpoint, as the server's gate
    demands; those of `points` are added.

    Args:
        state: from `to_state`, or from a restore.
        tokens: as many as the state covers, as in `CodecState.tokens`.
        points: restore points at shorter lengths, of the same layout.
        n_streams: streams of the server's cache, `CodecState.n_streams`: more than one with `-np` above 1 and
            without unified KV. The server refuses a file with another number.
        with_checkpoints: whether the build reads checkpoints out of slot files.

    Returns:
        Pieces of bytes, to be written to a file one after the other; views of the state where possible.

    Raises:
        UnknownLayout: the state was not made by this codec, or `tokens` do not fit.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) != state.n_tokens or state.n_tokens == 0:
        raise UnknownLayout(f"cannot be made of {len(ids)} tokens and a state of {state.n_tokens}")
    version, wrapped = _form(state)
    media = _media(state, ids)
    if media and not wrapped:
        raise UnknownLayout("cannot hold media in a token list without a header")
    checkpoints = None
    if with_checkpoints and any(not name.startswith("attn.") for name in state.tensors):
        by_length = {point.n_tokens: point for point in (*points, state)}
        if any(point.n_tokens > state.n_tokens or _form(point) != (version, wrapped) for point in by_length.values()):
            raise UnknownLayout("cannot take restore points of another layout or behind its end")
        checkpoints = tuple(
            _checkpoint(by_length[k], n_streams, at_end=k == state.n_tokens) for k in sorted(by_length) if k
        )
    ids = np.where(ids < 0, slot_file.NO_TOKEN, ids)
    if ids.max() > np.iinfo(np.int32).max:
        raise UnknownLayout("cannot hold token ids of more than 31 bits")
    memory = _memory(state, n_streams, partial=False)
    return slot_file.write(SlotFile(version, ids.astype(np.int32), wrapped, media, memory, checkpoints))


def _form(state: SequenceState) -> tuple[int, bool]:
    """The version of the file and whether its token list has a header; all tensors agree on them."""
    if not state.tensors or not all(_NAME.fullmatch(name) for name in state.tensors):
        raise UnknownLayout("cannot be made of a state of another codec")
    forms = {_dtype(tensor).form for tensor in state.tensors.values()}
    if len(forms) != 1:
        raise UnknownLayout("cannot be made of tensors of different files")
    return forms.pop()


def _dtype(tensor: Tensor) -> _Dtype:
    found = _DTYPE.fullmatch(tensor.dtype or "")
    if found is None:
        raise UnknownLayout(f"cannot be made of elements of the type {tensor.dtype}")
    rotation = found["rot"]
    return _Dtype(
        NUMBERS.get(found["type"], -1),
        (int(found["version"]), bool(found["wrapped"])),
        None if rotation is None else int(rotation),
        int(found["trans"] or 0),
        int(found["of"] or 0),
    )


def _media(state: SequenceState, ids: npt.NDArray[np.int64]) -> tuple[Media, ...]:
    """The chunks of the runs of negative ids, out of the state's `meta`.

    Where two chunks follow each other, the second one begins inside a run of negative ids: `meta` tells.
    """
    try:
        chunks = {
            int(name.removeprefix(MEDIA)): base64.b64decode(str(value), validate=True)
            for name, value in state.meta.items()
            if name.startswith(MEDIA)
        }
    except (ValueError, binascii.Error) as error:
        raise UnknownLayout("cannot be made of a state with damaged media") from error
    negative = ids < 0
    starts = set(np.flatnonzero(negative & ~np.concatenate(([False], negative[:-1]))).tolist())
    if not starts <= set(chunks) or not all(0 <= k < len(ids) and negative[k] for k in chunks):
        raise UnknownLayout("cannot be made of a state without its media: they are kept at its own length only")
    return tuple(Media(k, chunks[k]) for k in sorted(chunks))


def _checkpoint(state: SequenceState, n_streams: int, *, at_end: bool) -> Checkpoint:
    """The restore point of a state, with the positions that make the server go on at exactly its length.

    Of the last checkpoint with `pos_max` up to where the prompt goes on and `pos_min` below all that the window
    there looks at, the server restores the data and goes on at max(pos_min + 1, pos_max); it does not compare
    either with the data. So a window wants an early `pos_min`. Its `pos_max` is the length itself at the end of
    the token list, which no reading of the number can overstep, and the last position before that, where one
    token is evaluated again. A recurrent state must go on exactly behind its position, or the server aborts.
    """
    windows = [tensor.size for tensor in state.tensors.values() if isinstance(tensor, Window)]
    recurrent = any(isinstance(tensor, Opaque) for tensor in state.tensors.values())
    last = _last_position(state)
    pos_min = pos_max = last
    if windows and (at_end or not recurrent):
        pos_min, pos_max = max(0, last - max(windows)), last + 1 if at_end else last
    data = slot_file.write_partial(_memory(state, n_streams, partial=True))
    return Checkpoint(state.n_tokens, pos_min, pos_max, data)


def _last_position(state: SequenceState) -> int:
    cell = state.tensors.get("attn.cell")
    return state.n_tokens - 1 if cell is None else int(cell.array[-1, 0])


def _memory(state: SequenceState, n_streams: int, *, partial: bool) -> Memory:
    by_prefix: dict[str, dict[str, Tensor]] = {"attn": {}, "swa": {}, "rec": {}}
    for name, tensor in state.tensors.items():
        prefix, rest = name.split(".", 1)
        by_prefix[prefix][rest] = tensor
    base = None if partial else _section(by_prefix["attn"], state.n_tokens, n_streams)
    swa = _section(by_prefix["swa"], state.n_tokens, n_streams)
    recurrent = _recurrent(by_prefix["rec"], _last_position(state)) if by_prefix["rec"] else None
    return Memory(base, swa, recurrent)


def _section(tensors: Mapping[str, Tensor], n: int, n_streams: int) -> KvSection | None:
    if not tensors:
        return None
    keys, values = _numbered(tensors, "k"), _numbered(tensors, "v")
    held = _n_rows(keys[0])
    cell = tensors.get("cell")
    positions = np.arange(n - held, n, dtype=np.int32) if cell is None else cell.array[:, 0]
    if any(_n_rows(tensor) != held for tensor in (*keys, *values)) or len(positions) != held:
        raise UnknownLayout("cannot be made of tensors of different lengths")
    first = [_dtype(keys[0]), _dtype(values[0] if values else keys[0])]
    v_trans = int(getattr(values[0], "axis", 0)) if values else first[0].trans
    rotations = (first[0].rotation, first[1].rotation if values else 0)
    stream = Stream(
        positions,
        None if cell is None else cell.array[:, 1:],
        np.zeros(held, np.int32),
        v_trans,
        None if rotations[0] is None or rotations[1] is None else (rotations[0], rotations[1]),
        tuple(_plane(tensor) for tensor in keys),
        tuple(_plane(tensor) for tensor in values),
    )
    return KvSection((stream,) + (None,) * (n_streams - 1))


def _recurrent(tensors: Mapping[str, Tensor], last: int) -> RecurrentSection:
    r, s = _numbered(tensors, "r"), _numbered(tensors, "s")
    return RecurrentSection(
        np.array([last], np.int32),
        _dtype(r[0]).n_layers,
        tuple(_plane(tensor) for tensor in r),
        tuple(_plane(tensor) for tensor in s),
    )


def _numbered(tensors: Mapping[str, Tensor], part: str) -> list[Tensor]:
    names = sorted(name for name in tensors if name.startswith(f"{part}."))
    if names != [f"{part}.{i:03d}" for i in range(len(names))] or (part in "kr" and not names):
        raise UnknownLayout(f"cannot be made of the tensors {names}: some are missing")
    return [tensors[name] for name in names]


def _n_rows(tensor: Tensor) -> int:
    return 1 if isinstance(tensor, Opaque) else int(tensor.array.shape[tensor.axis])


def _plane(tensor: Tensor) -> Plane:
    number = _dtype(tensor).number
    if number not in TYPES:
        raise UnknownLayout(f"cannot be made of elements of the type {tensor.dtype}")
    array = tensor.array
    if not isinstance(tensor, Opaque) and tensor.axis == 1:
        return Plane(number, array.itemsize, array.shape[0], _bytes(array))
    return Plane(number, array.nbytes // _n_rows(tensor), 0, _bytes(array))


def _bytes(array: Array) -> Piece:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else b""
