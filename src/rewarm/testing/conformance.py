"""What every codec must pass: an adapter's tests subclass `CodecConformance` and hand it an engine.

    class TestMyCodec(CodecConformance):
        def engine(self): return MyEngine()

Each test saves states through a real cache in a folder of its own (`tmp_path`, pytest's), restores them and
compares bit for bit. The suite does not know engines, and judges no text and no logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.sequence import Array, SequenceState, Tensor

BLOCK_TOKENS = 4
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 19)
TOKENS = tuple(range(11, 11 + 24))


class CodecEngine(ABC):
    """An engine as its adapter sees it: live caches, and the codec between them and `SequenceState`.

    Attributes:
        refusal: the error that the codec raises for a cache that it does not know.
    """

    refusal: type[Exception] = Exception

    @abstractmethod
    def run(self, tokens: Sequence[int], live: Any = None) -> Any:
        """Evaluate `tokens` in one chunk, on top of `live` (None: a fresh cache); the live cache after them."""

    @abstractmethod
    def encode(self, live: Any) -> SequenceState:
        """The codec: a live cache's state."""

    @abstractmethod
    def decode(self, state: SequenceState) -> Any:
        """The codec: a live cache that holds `state`."""

    @abstractmethod
    def unknown(self) -> Any:
        """A live cache of a kind that the codec does not know, or None when there can be none."""


def difference(got: SequenceState, want: SequenceState) -> str:
    """What tells two states apart, bit for bit; empty when nothing does."""
    if got.n_tokens != want.n_tokens:
        return f"{got.n_tokens} tokens instead of {want.n_tokens}"
    if set(got.tensors) != set(want.tensors):
        return f"tensors {sorted(got.tensors)} instead of {sorted(want.tensors)}"
    if got.layout() != want.layout():
        return f"layout {got.layout()} instead of {want.layout()}"
    for name, tensor in want.tensors.items():
        if not np.array_equal(_bits(got.tensors[name]), _bits(tensor)):
            return f"tensor {name} has other bits"
    return ""


def cut(state: SequenceState, n: int) -> SequenceState:
    """The first `n` tokens of a state of rows alone."""
    tensors = {}
    for name, tensor in state.tensors.items():
        index = (slice(None),) * getattr(tensor, "axis", 0) + (slice(0, n),)
        tensors[name] = type(tensor)(tensor.array[index], tensor.axis, dtype=tensor.dtype)  # type: ignore[call-arg, union-attr]
    return SequenceState(n, tensors, {}, state.valid_from)


def copy(state: SequenceState) -> SequenceState:
    """`state` with arrays of its own, so that later changes of the live cache do not show."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.tensors.items():
        fields = {field: getattr(tensor, field) for field in tensor.__dataclass_fields__}
        tensors[name] = type(tensor)(**(fields | {"array": np.array(tensor.array)}))
    return SequenceState(state.n_tokens, tensors, dict(state.meta), state.valid_from)


def _bits(tensor: Tensor) -> Array:
    array = np.ascontiguousarray(tensor.array)
    return array.view(np.uint8)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A namespace of a cache in `path`, closed afterwards."""
    raise NotImplementedError(path, PrefixCache)
    yield


class CodecConformance(ABC):
    """The suite. Subclass it in a test module and return an engine."""

    @abstractmethod
    def engine(self) -> CodecEngine:
        """The engine whose codec is tested; called once per test."""
