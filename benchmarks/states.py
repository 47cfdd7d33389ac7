"""States shaped like those of real models, filled with finite random bits; no model is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewarm.state.sequence import Array, Opaque, Rows, SequenceState, Tensor, Window

TILE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model's cache looks like.

    Attributes:
        name: of the shape.
        layers: of full attention, each with keys and values of (1, heads, n_tokens, width), bfloat16.
        heads: KV heads.
        width: of a head.
        window_layers: layers of sliding-window attention, of as many heads.
        window: rows that such a layer holds.
        latent: width of the one tensor of a layer of latent attention, (1, 1, n_tokens, latent); 0 for keys and values.
        recurrent_layers: layers with a recurrent state.
        recurrent_bytes: of each.
    """

    name: str
    layers: int
    heads: int
    width: int
    window_layers: int = 0
    window: int = 0
    latent: int = 0
    recurrent_layers: int = 0
    recurrent_bytes: int = 0


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("7b", layers=32, heads=8, width=128),
        Shape("32b", layers=64, heads=8, width=128),
        Shape("mla", layers=27, heads=1, width=64, latent=576),
        Shape("window", layers=5, heads=4, width=256, window_layers=29, window=1024),
        Shape("hybrid", layers=12, heads=2, width=256, recurrent_layers=36, recurrent_bytes=2 * 2**20),
    )
}


def tokens_of(n_tokens: int, seed: int = 0) -> list[int]:
    """A prompt, the same each time; prompts of one seed are prefixes of each other."""
    return [(7919 * i + 104_729 * seed + 1) % 50_021 for i in range(n_tokens)]


class Filler:
    """Makes arrays out of one tile of random bits; each begins elsewhere in it, so that no two are alike."""

    def __init__(self, seed: int = 0) -> None:
        bits = np.random.default_rng(seed).integers(0, 2**16, TILE_BYTES // 2, dtype=np.uint16)
        # An exponent's highest bit cleared: neither NaN nor infinity as bfloat16 or float16.
        self._tile: npt.NDArray[np.uint16] = bits & np.uint16(0xBFFF)
        self._at = 0

    def array(self, shape: Sequence[int]) -> Array:
        """An array of 16-bit elements."""
        made = np.empty(shape, np.uint16)
        flat, done = made.reshape(-1), 0
        self._at = (self._at + 40_503) % len(self._tile)
        start = self._at
        while done < len(flat):
            piece = self._tile[start : start + len(flat) - done]
            flat[done : done + len(piece)] = piece
            done, start = done + len(piece), 0
        return made


def state_of(shape: Shape, n_tokens: int, filler: Filler | None = None) -> SequenceState:
    """A state of `n_tokens` tokens: `layers.III.NAME` to tensors, as an adapter would name them."""
    fill = filler or Filler()
    tensors: dict[str, Tensor] = {}
    for i in range(shape.layers):
        if shape.latent:
            rows = fill.array((1, 1, n_tokens, shape.latent))
            tensors[f"layers.{i:03d}.latent"] = Rows(rows, 2, "bfloat16")
            continue
        for part in ("keys", "values"):
            rows = fill.array((1, shape.heads, n_tokens, shape.width))
            tensors[f"layers.{i:03d}.{part}"] = Rows(rows, 2, "bfloat16")
    for i in range(shape.layers, shape.layers + shape.window_layers):
        for part in ("keys", "values"):
            rows = fill.array((1, shape.heads, min(n_tokens, shape.window), shape.width))
            tensors[f"layers.{i:03d}.{part}"] = Window(rows, 2, shape.window, 0, "bfloat16")
    for i in range(shape.layers, shape.layers + shape.recurrent_layers):
        tensors[f"layers.{i:03d}.state"] = Opaque(fill.array((1, shape.recurrent_bytes // 2)), "bfloat16")
    return SequenceState(n_tokens, tensors)


def nbytes_of(state: SequenceState) -> int:
    """Bytes of all tensors."""
    return sum(tensor.array.nbytes for tensor in state.tensors.values())
