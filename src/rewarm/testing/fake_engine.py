"""An engine without a model: states whose every element names the seed, the tensor and all tokens so far.

    h[i]     = sum over j <= i of mix(token[j], j, seed)      the rolling prefix hash, one u64 per token
    row i    = mix(h[i], tensor, element)                     rows and windows
    opaque   = mix(h[n - 1], tensor, element)                 recurrent states

So a row that is stale, foreign, misplaced or zero differs from the right one in an exact comparison, in
every process and on every machine. Float tensors hold any bits but those of NaN and infinity. It knows
nothing of stores, files or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from rewarm.state.layout import Kind
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Tensor, Window

U64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

# Storage width in bytes, and the bit whose clearing leaves no NaN and no infinity (the exponent's highest).
_DTYPES: dict[str, tuple[str, int | None]] = {
    "bfloat16": ("<u2", 14),
    "float16": ("<f2", 14),
    "float32": ("<f4", 30),
    "float64": ("<f8", 62),
    "int8": ("|i1", None),
    "uint8": ("|u1", None),
    "uint16": ("<u2", None),
    "uint32": ("<u4", None),
    "int64": ("<i8", None),
}


class StateMismatch(AssertionError):
    """A state is not the one that its tokens give; the message names tensor, row and what stands there."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a fake layer.

    Attributes:
        name: unique in the layer.
        kind: rows, window or opaque.
        dtype: a key of `_DTYPES`.
        shape: the shape without the token axis.
        axis: the token axis (unused by opaque tensors).
        size: rows of a window at most.
        keep: first rows that a window never drops.
    """

    name: str
    kind: Kind = Kind.ROWS
    dtype: str = "float32"
    shape: tuple[int, ...] = (4,)
    axis: int = 0
    size: int = 0
    keep: int = 0

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The element type as numpy stores it."""
        return np.dtype(_DTYPES[self.dtype][0])

    def kept(self, n: int) -> npt.NDArray[np.int64]:
        """The positions of the tokens whose rows the tensor holds after `n` tokens, in order."""
        if self.kind is Kind.OPAQUE:
            return np.array([n - 1], dtype=np.int64) if n else np.zeros(0, dtype=np.int64)
        if self.kind is Kind.WINDOW and n > self.size:
            last = np.arange(n - (self.size - self.keep), n)
            return np.concatenate([np.arange(self.keep), last])
        return np.arange(n)

    def wrap(self, array: Array) -> Tensor:
        """`array` as a tensor of a `SequenceState`."""
        dtype = self.dtype if self.dtype == "bfloat16" else None
        if self.kind is Kind.OPAQUE:
            return Opaque(array, dtype)
        if self.kind is Kind.WINDOW:
            return Window(array, self.axis, self.size, self.keep, dtype)
        return Rows(array, self.axis, dtype)


Layer = tuple[Part, ...]


def pair(heads: int = 2, width: int = 4, dtype: str = "float32", axis: int = 1) -> Layer:
    """Keys and values of a full-attention layer, shape (1, heads, n, width) where `axis` is 2."""
    shape = (1, heads, width)
    return (Part("keys", dtype=dtype, shape=shape, axis=axis), Part("values", dtype=dtype, shape=shape, axis=axis))


def latent(width: int = 6, dtype: str = "bfloat16", axis: int = 0) -> Layer:
    """The single tensor of a layer with latent attention, shape (n, width)."""
    return (Part("latent", dtype=dtype, shape=(width,), axis=axis),)


def triple(heads: int = 2, width: int = 4) -> Layer:
    """Quantised rows: packed weights with scales and biases, shapes (heads, n, width) and (heads, n, 1)."""
    return (
        Part("packed", dtype="uint32", shape=(heads, width), axis=1),
        Part("scales", dtype="float16", shape=(heads, 1), axis=1),
        Part("biases", dtype="float16", shape=(heads, 1), axis=1),
    )


def window(size: int = 6, keep: int = 0, width: int = 4, dtype: str = "float32", axis: int = 1) -> Layer:
    """Keys and values of a sliding-window layer: the first `keep` and the last `size - keep` rows."""
    return tuple(Part(name, Kind.WINDOW, dtype, (2, width), axis, size=size, keep=keep) for name in ("keys", "values"))


def recurrent(shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> Layer:
    """The state of a recurrent layer, and the short convolution before it: valid at exactly n tokens."""
    return (Part("conv", Kind.OPAQUE, "bfloat16", (3,)), Part("state", Kind.OPAQUE, dtype, shape))


@dataclass(frozen=True)
class FakeEngine:
    """Computes the state of any token sequence, and checks one exactly.

    Attributes:
        seed: the weights; another seed is another model.
        layers: what each layer keeps.
        quantise_from: from this length on the engine holds `quantised` layers instead (all rows, also the
            earlier ones), which are valid from that length only.
        quantised: the layers from `quantise_from` on.
    """

    seed: int = 0
    layers: tuple[Layer, ...] = field(default_factory=lambda: (pair(), pair()))
    quantise_from: int | None = None
    quantised: tuple[Layer, ...] = field(default_factory=lambda: (triple(), triple()))

    def parts(self, n: int) -> dict[str, Part]:
        """The tensors of a state of `n` tokens, by name: "layer.part"."""
        quantised = self.quantise_from is not None and n >= self.quantise_from
        layers = self.quantised if quantised else self.layers
        return {f"{i:02d}.{part.name}": part for i, layer in enumerate(layers) for part in layer}

    def valid_from(self, n: int) -> int:
        """The shortest length to which the rows of a state of `n` tokens may be cut."""
        return self.quantise_from if self.quantise_from is not None and n >= self.quantise_from else 0

    def state(self, tokens: Sequence[int] | Array) -> SequenceState:
        """The state after `tokens`; arrays are views with the token axis moved into place, as engines give."""
        ids = _ids(tokens)
        n = len(ids)
        hashes = self._hashes(ids)
        tensors = {name: part.wrap(self._array(name, part, hashes)) for name, part in self.parts(n).items()}
        return SequenceState(n, tensors, self.meta(ids), self.valid_from(n))

    def meta(self, tokens: Sequence[int] | Array) -> dict[str, MetaValue]:
        """What belongs to the state at exactly this length, one value of each type."""
        ids = _ids(tokens)
        last = int(self._hashes(ids)[-1]) if len(ids) else 0
        return {"offset": len(ids), "digest": f"{last:016x}", "scale": 0.5, "ring": False, "none": None}

    def extend(self, state: SequenceState, tokens: Sequence[int] | Array) -> SequenceState:
        """The state after `tokens`, computed on from `state` as an engine would: its faults stay in it.

        Raises:
            ValueError: when `state` covers more than `tokens`, or the engine quantises in between.
        """
        ids = _ids(tokens)
        if state.n_tokens > len(ids):
            raise ValueError(f"a state of {state.n_tokens} tokens cannot be extended to {len(ids)}")
        if self.parts(state.n_tokens) != self.parts(len(ids)):
            raise ValueError("the engine quantises between these lengths")
        right, before = self.state(ids), self.state(ids[: state.n_tokens])
        tensors = {}
        for name, part in self.parts(len(ids)).items():
            fresh = _bits(right.tensors[name].array).copy()
            held, true = _bits(state.tensors[name].array), _bits(before.tensors[name].array)
            if part.kind is Kind.OPAQUE:
                fresh ^= held ^ true if state.n_tokens else np.zeros_like(fresh)
            else:
                _, to, from_ = np.intersect1d(part.kept(len(ids)), part.kept(state.n_tokens), return_indices=True)
                target, source = np.moveaxis(fresh, part.axis, 0), np.moveaxis(held, part.axis, 0)
                target[to] = source[from_]
            tensors[name] = part.wrap(fresh.view(part.storage))
        return SequenceState(len(ids), tensors, right.meta, right.valid_from)

    def check(self, state: SequenceState, tokens: Sequence[int] | Array, *, exact: bool = False) -> None:
        """Compare `state` with the state of the first `state.n_tokens` tokens, bit for bit.

        Args:
            state: as restored; of 0 tokens it must hold no tensors.
            tokens: the prompt; it may be longer than the state.
            exact: `meta` must be that of the length (a point); else it may be empty too.

        Raises:
            StateMismatch: with the tensor and the row that differ, and what stands there instead.
        """
        ids = _ids(tokens)
        if state.n_tokens > len(ids):
            raise StateMismatch(f"the state covers {state.n_tokens} tokens of a prompt of {len(ids)}")
        if state.n_tokens == 0:
            if state.tensors:
                raise StateMismatch(f"a state of no tokens holds tensors: {sorted(state.tensors)}")
            return
        right = self.state(ids[: state.n_tokens])
        if set(state.tensors) != set(right.tensors):
            raise StateMismatch(f"tensors {sorted(state.tensors)} instead of {sorted(right.tensors)}")
        if state.layout() != right.layout():
            raise StateMismatch(f"layout {state.layout()} instead of {right.layout()}")
        for name, part in self.parts(state.n_tokens).items():
            self._check_tensor(name, part, state, right)
        if dict(state.meta) != dict(right.meta) and (exact or state.meta):
            raise StateMismatch(f"meta {dict(state.meta)} instead of {dict(right.meta)}")

    def _check_tensor(self, name: str, part: Part, state: SequenceState, right: SequenceState) -> None:
        got, want = _bits(state.tensors[name].array), _bits(right.tensors[name].array)
        if got.shape != want.shape:
            raise StateMismatch(f"tensor {name}: shape {got.shape} instead of {want.shape}")
        if np.array_equal(got, want):
            return
        if part.kind is Kind.OPAQUE:
            n_bad = int((got != want).sum())
            raise StateMismatch(f"tensor {name} (opaque) after {state.n_tokens} tokens: {n_bad} elements differ")
        got_rows = np.moveaxis(got, part.axis, 0).reshape(got.shape[part.axis], -1)
        want_rows = np.moveaxis(want, part.axis, 0).reshape(got_rows.shape)
        bad = np.flatnonzero((got_rows != want_rows).any(axis=1))
        at = int(bad[0])
        token = int(part.kept(state.n_tokens)[at])
        raise StateMismatch(
            f"tensor {name} ({part.kind}) of {state.n_tokens} tokens: {len(bad)} of {len(got_rows)} rows differ, "
            f"the first is row {at} (token {token}): {_what(got_rows[at], want_rows, part, state.n_tokens)}"
        )

    def _hashes(self, ids: npt.NDArray[np.int64]) -> U64:
        salt = np.uint64(self.seed % 2**64)
        places = _mix(np.arange(len(ids), dtype=np.uint64) * _GOLDEN + salt)
        return np.cumsum(_mix(ids.view(np.uint64) ^ places), dtype=np.uint64)

    def _array(self, name: str, part: Part, hashes: U64) -> Array:
        """The tensor after `len(hashes)` tokens."""
        width = int(np.prod(part.shape))
        salt = int.from_bytes(blake3(f"{self.seed} {name} {part.dtype}".encode()).digest(8), "little")
        columns = np.arange(width, dtype=np.uint64) * _GOLDEN + np.uint64(salt)
        kept = hashes[part.kept(len(hashes))]
        if part.kind is Kind.OPAQUE and not len(kept):
            kept = np.zeros(1, dtype=np.uint64)
        mixed = _mix(_mix(kept)[:, None] ^ columns[None, :])
        storage, clear = _DTYPES[part.dtype]
        bits = (mixed >> np.uint64(64 - 8 * np.dtype(storage).itemsize)).astype(f"<u{np.dtype(storage).itemsize}")
        if clear is not None:
            bits &= bits.dtype.type(~(1 << clear) & (2 ** (8 * bits.dtype.itemsize) - 1))
        array = bits.view(storage)
        if part.kind is Kind.OPAQUE:
            return array.reshape(part.shape)
        return np.moveaxis(array.reshape((len(kept), *part.shape)), 0, part.axis)


def _ids(tokens: Sequence[int] | Array) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(np.asarray(tokens, dtype=np.int64).reshape(-1))


def _mix(x: U64) -> U64:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _bits(array: Array) -> Array:
    """The elements as unsigned integers, so that NaN and negative zero compare as the bits that they are."""
    return array.view(f"u{array.dtype.itemsize}")


def _what(row: Array, right: Array, part: Part, n: int) -> str:
    """What stands in a wrong row, as far as it can be told."""
    same = np.flatnonzero((right == row).all(axis=1))
    if len(same):
        return f"it holds the row of token {int(part.kept(n)[same[0]])}"
    if not row.any():
        return "it is zero"
    if (right == row).any():
        return "it is right in part"
    return "it belongs to no token of this sequence"
