"""Between MLX's arrays and the tensors of a state: names, numpy views, dtypes, padding, buffers.

What every cache's codec needs, and nothing of any cache class. Reading an array here gives a view into
MLX's memory, which holds as long as the array is not changed; making one copies, unless the bytes were
read into MLX's memory by way of `Buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from rewarm.cache.memory import free_memory
from rewarm.errors import EngineError
from rewarm.state.layout import Kind, Layout
from rewarm.state.sequence import Array, MetaValue, Opaque, Rows, SequenceState, Tensor, Window

PAD_ROWS = 256
"""mlx-lm's own growth step; buffers of a multiple of it take the fused attention path."""


class UnsupportedCache(EngineError):
    """A cache whose state cannot be taken apart and put together again bit for bit."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What is taken from one cache: tensors and plain values, under the cache's own prefix.

    Attributes:
        n_tokens: length of the state that is being made.
        n_held: tokens that the caches hold, `n_tokens` or more.
        quantised_from: from which length on the engine quantises KV; None when nobody said.
        prefix: of this cache's names.
        tensors: of all caches, by full name.
        meta: of all caches, by full name.
    """

    n_tokens: int
    n_held: int
    quantised_from: int | None = None
    prefix: str = ""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, MetaValue] = field(default_factory=dict)

    def under(self, name: str) -> Taken:
        """The same for a cache inside this one."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def rows(self, name: str, array: mx.array, axis: int = 2) -> None:
        """The first `n_tokens` rows of `array`."""
        bits, dtype = view(array)
        self.tensors[self.prefix + name] = Rows(_along(bits, axis, 0, self.n_tokens), axis, dtype)

    def window(self, name: str, rows: Array, dtype: str | None, size: int, keep: int = 0, axis: int = 2) -> None:
        """Rows in token order: the first `keep`, then the last ones, `size` in all at most."""
        self.tensors[self.prefix + name] = Window(rows, axis, size, keep, dtype)

    def opaque(self, name: str, array: mx.array) -> None:
        """The whole of `array`, which belongs to the state at exactly `n_held` tokens.

        Raises:
            UnsupportedCache: the state is to be shorter.
        """
        if self.n_tokens != self.n_held:
            raise UnsupportedCache(f"a state after {self.n_held} tokens that cannot be cut to {self.n_tokens}")
        bits, dtype = view(array)
        self.tensors[self.prefix + name] = Opaque(bits, dtype)


class Buffers:
    """MLX's own memory for a restore to read into, so that nothing is copied afterwards.

    Make it on the thread that generates, hand `into` to `restore` on any thread, and give it to `decode`
    on the first thread again. Memory for rows and windows is there from the start, as much as the match
    needs; opaque tensors, whose shapes no layout knows, are read into numpy's memory and let go one by one.
    So is everything where MLX gives no views, and what a restore asks for again after a damaged record: a read
    that was given up may still end in the first buffer. Where there is not enough free memory none is taken,
    and the restore ends as `busy`.

    Args:
        layout: of the match.
        n_tokens: of the match.
    """

    def __init__(self, layout: Layout, n_tokens: int) -> None:
        self._arrays: dict[str, mx.array] = {}
        self._views: dict[str, Array] = {}
        self._to_give: set[str] = set()
        free = free_memory()
        self._has_room = free is None or layout.state_nbytes(n_tokens) <= free
        if not self._has_room:
            return
        for spec in layout.tensors:
            if spec.kind is Kind.OPAQUE:
                continue
            n_rows = padded(n_tokens) if spec.kind is Kind.ROWS else spec.window_rows(n_tokens)
            self._arrays[spec.name] = mx.zeros(spec.shape_with(n_rows), _mlx_type(spec.storage))
        mx.eval(list(self._arrays.values()))
        views = {name: writable(array) for name, array in self._arrays.items()}
        self._views = {name: found for name, found in views.items() if found is not None}
        self._to_give = set(self._views)

    def into(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """The buffer for a tensor (any thread), once; its token axis may be longer than `shape` asks.

        Raises:
            MemoryError: there was not enough memory when the buffers were to be made.
        """
        if not self._has_room:
            raise MemoryError("not enough free memory for the state")
        found = self._views[name] if name in self._to_give else None
        if found is None or found.dtype != dtype or any(a < b for a, b in zip(found.shape, shape, strict=True)):
            return np.empty(shape, dtype)
        self._to_give.discard(name)
        return found

    def take(self, name: str, tensor: Tensor) -> mx.array | None:
        """The array behind `tensor`, once, if the tensor was read into it."""
        if self._views.get(name) is not tensor.array:
            return None
        del self._views[name]
        return self._arrays.pop(name)


class Given:
    """What is given to one cache: the tensors and values of a state under the cache's prefix.

    Attributes:
        n_tokens: of the state.
    """

    def __init__(self, state: SequenceState, buffers: Buffers | None = None) -> None:
        self.n_tokens = state.n_tokens
        self._state = state
        self._buffers = buffers
        self._prefix = ""
        self._left = set(state.tensors)

    def under(self, name: str) -> Given:
        """The same for a cache inside this one."""
        other = Given.__new__(Given)
        other.__dict__.update(self.__dict__)
        other._prefix = f"{self._prefix}{name}."
        return other

    def names(self) -> list[str]:
        """What there is under this prefix, prefix apart, in order."""
        n = len(self._prefix)
        return sorted(name[n:] for name in self._state.tensors if name.startswith(self._prefix))

    def tensor(self, name: str) -> Tensor:
        """A tensor's description.

        Raises:
            UnsupportedCache: there is none of that name.
        """
        try:
            return self._state.tensors[self._prefix + name]
        except KeyError:
            raise UnsupportedCache(f"a state without the tensor {self._prefix + name!r}") from None

    def value(self, name: str) -> int:
        """A plain number.

        Raises:
            UnsupportedCache: there is none of that name.
        """
        found = self._state.meta.get(self._prefix + name)
        if not isinstance(found, int):
            raise UnsupportedCache(f"a state without the number {self._prefix + name!r}")
        return found

    def rows(self, name: str, *, pad: bool = True, axis: int = 2) -> mx.array:
        """Rows in an array whose token axis is `n_tokens`, or padded: what lies behind is never read."""
        tensor = self.tensor(name)
        if not isinstance(tensor, Rows) or tensor.axis != axis:
            raise UnsupportedCache(f"a state whose tensor {self._prefix + name!r} is of another kind")
        n_rows = padded(self.n_tokens) if pad else self.n_tokens
        return self._array(name, tensor, axis, n_rows)

    def window(self, name: str, size: int, keep: int = 0, axis: int = 2) -> mx.array:
        """The rows of a window in token order.

        Raises:
            UnsupportedCache: the state's window is another one.
        """
        tensor = self.tensor(name)
        if not isinstance(tensor, Window) or tensor.axis != axis or (tensor.size, tensor.keep) != (size, keep):
            raise UnsupportedCache(f"a state whose tensor {self._prefix + name!r} is no window of {size}, {keep}")
        return self._array(name, tensor, axis, min(self.n_tokens, size))

    def opaque(self, name: str) -> mx.array:
        """A tensor as a whole."""
        tensor = self.tensor(name)
        if not isinstance(tensor, Opaque):
            raise UnsupportedCache(f"a state whose tensor {self._prefix + name!r} is of another kind")
        return self._array(name, tensor, 0, None)

    def check_used_up(self) -> None:
        """Whether every tensor has found its place.

        Raises:
            UnsupportedCache: one has not.
        """
        if self._left:
            raise UnsupportedCache(f"a state with tensors that the model's layers do not hold: {min(self._left)}")

    def _array(self, name: str, tensor: Tensor, axis: int, n_rows: int | None) -> mx.array:
        full = self._prefix + name
        self._left.discard(full)
        made = self._buffers.take(full, tensor) if self._buffers is not None else None
        if made is None:
            made = _copied(tensor.array, axis, n_rows)
        elif n_rows is not None and made.shape[axis] != n_rows:
            # The match was longer than what could be restored in the end.
            made = mx.contiguous(made[(*(slice(None),) * axis, slice(0, n_rows))])
            mx.eval(made)
        if self._buffers is not None and isinstance(self._state.tensors, dict):
            del self._state.tensors[full]  # used up: its memory goes before the next one's is made
        return made.view(mx.bfloat16) if tensor.dtype == "bfloat16" else made


def view(array: mx.array) -> tuple[Array, str | None]:
    """A numpy view of an evaluated array, and its dtype's name where numpy has none: bfloat16's bits are uint16.

    Raises:
        UnsupportedCache: elements that do not come back as they are.
    """
    if array.dtype == mx.float64:
        raise UnsupportedCache("elements of type float64, which MLX would round when they come back")
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16), copy=False), "bfloat16"
    return np.array(array, copy=False), None


def writable(array: mx.array) -> Array | None:
    """A numpy view through which an evaluated array's memory can be filled; None where MLX gives copies."""
    found = np.array(array, copy=False)
    if found.size and (found.flags.owndata or not found.flags.writeable or not found.flags.c_contiguous):
        return None
    return found


def one_sequence(cache: object, *arrays: mx.array) -> None:
    """Whether every array holds one sequence.

    Raises:
        UnsupportedCache: one holds a batch.
    """
    for array in arrays:
        if array.shape[0] != 1:
            raise UnsupportedCache(
                f"{type(cache).__name__} with a batch of {array.shape[0]} sequences; extract one first"
            )


def padded(n_tokens: int) -> int:
    """The next multiple of mlx-lm's growth step."""
    return -(-n_tokens // PAD_ROWS) * PAD_ROWS


def _copied(bits: Array, axis: int, n_rows: int | None) -> mx.array:
    """`bits` in an array of its own, with `n_rows` rows."""
    shape = bits.shape
    if n_rows is not None:
        bits = _along(bits, axis, 0, min(n_rows, shape[axis]))
        shape = (*shape[:axis], n_rows, *shape[axis + 1 :])
    part = tuple(slice(0, n) for n in bits.shape)
    made = mx.zeros(shape, _mlx_type(bits.dtype))
    mx.eval(made)
    target = writable(made)
    if target is None:
        whole = np.zeros(shape, bits.dtype)
        whole[part] = bits
        return mx.array(whole)
    target[part] = bits
    return made


def _along(array: Array, axis: int, start: int, end: int) -> Array:
    return array[(*(slice(None),) * axis, slice(start, end))]


def _mlx_type(storage: npt.DTypeLike) -> mx.Dtype:
    return mx.array(np.empty((), storage)).dtype
