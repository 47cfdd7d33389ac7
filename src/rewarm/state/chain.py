"""Keys: how blocks of tokens and restore points are named, each by a hash over all tokens before it.

    root  = H("rewarm/1 root", block size, fingerprint, layout digest, tenant)
    block = H("rewarm/1 block", parent, tokens of the block)
    point = H("rewarm/1 point", parent, n, tokens past the parent)

H is BLAKE3 with 32 bytes out; every field is preceded by its length as u64, integers are i64, all
little-endian. Equal keys therefore mean equal model, layout, tenant and token ids from the first on.
It does not know what records hold or where they are.

The tokens of a record also have an *ordered* form, in which the index sorts siblings: comparing two of
them as bytes compares the token ids, and a prefix of bytes is a prefix of tokens.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NewType

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Key = NewType("Key", bytes)
Tokens = npt.NDArray[np.int64]

KEY_NBYTES = 32
_MIN, _MAX = -(2**63), 2**63 - 1


def as_tokens(tokens: Iterable[int] | Tokens) -> Tokens:
    """Token ids as a private array of little-endian i64, which cannot be written: keys are kept for it.

    Raises:
        ValueError: when a token id is no 64-bit signed integer.
    """
    array = tokens if isinstance(tokens, np.ndarray) else _array(list(tokens))
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, dtype="<i8")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError("tokens must be one sequence of 64-bit signed integers")
    if array.dtype == np.uint64 and int(array.max()) > _MAX:
        raise ValueError("a token id is not a 64-bit signed integer")
    own = array.astype("<i8")
    own.flags.writeable = False
    return own


def _array(tokens: list[int]) -> npt.NDArray[Any]:
    try:
        # Faster than numpy, which first looks at every token to find out what it is; takes integers only.
        return np.frombuffer(struct.pack(f"{len(tokens)}q", *tokens), dtype=np.int64)
    except struct.error:
        return np.array(tokens)


def _hash(domain: bytes, *fields: bytes) -> Key:
    hasher = blake3()
    for part in (domain, *fields):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return Key(hasher.digest())


def _integer(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def root_key(block_tokens: int, fingerprint: bytes, layout_digest: bytes, tenant: bytes) -> Key:
    """The key that the first block and the first points of a chain hang from."""
    return _hash(b"rewarm/1 root", _integer(block_tokens), fingerprint, layout_digest, tenant)


def block_key(parent: Key, tokens: Tokens) -> Key:
    """The key of a full block of `tokens` under `parent`."""
    return _hash(b"rewarm/1 block", parent, tokens.tobytes())


def point_key(parent: Key, n: int, tail: Tokens) -> Key:
    """The key of the restore point at `n`, whose last full block is `parent` and which ends with `tail`."""
    return _hash(b"rewarm/1 point", parent, _integer(n), tail.tobytes())


class Chain:
    """The keys along one sequence of tokens, computed as far as they are asked for, by whichever thread.

    Attributes:
        root: the key before the first block.
        tokens: all token ids, little-endian i64, shape (n,).
        block_tokens: tokens per block.
    """

    def __init__(self, root: Key, tokens: Tokens, block_tokens: int) -> None:
        self.root = root
        self.tokens = tokens
        self.block_tokens = block_tokens
        self._blocks: list[Key] = []
        self._growing = threading.Lock()

    def begin_with(self, other: Chain, n_blocks: int) -> None:
        """Take over the known keys of the first `n_blocks` blocks from a chain of the same tokens."""
        with self._growing:
            self._blocks = other._blocks[:n_blocks]

    @property
    def n_blocks(self) -> int:
        """Full blocks in the sequence."""
        return len(self.tokens) // self.block_tokens

    def block(self, i: int) -> Key:
        """The key of block `i`, which covers tokens `[i * block_tokens, (i + 1) * block_tokens)`."""
        blocks, size = self._blocks, self.block_tokens
        if len(blocks) <= i:
            with self._growing:  # two threads that append at once would put a key in another one's place
                while (k := len(blocks)) <= i:
                    parent = blocks[-1] if k else self.root
                    blocks.append(block_key(parent, self.tokens[k * size : (k + 1) * size]))
        return blocks[i]

    def parent(self, i: int) -> Key:
        """The key that block `i`, and the points before its end, hang from."""
        return self.block(i - 1) if i else self.root

    def blocks(self) -> list[Key]:
        """The keys of all full blocks."""
        n = self.n_blocks
        if n:
            self.block(n - 1)
        return self._blocks[:n]

    def tail(self, i: int) -> Tokens:
        """The tokens past the first `i` blocks."""
        return self.tokens[i * self.block_tokens :]

    def point(self, n: int) -> Key:
        """The key of the restore point at `n`."""
        i = n // self.block_tokens
        return point_key(self.parent(i), n, self.tokens[i * self.block_tokens : n])


class ChainMemo:
    """Makes chains that begin with the keys of earlier ones: a turn costs its new tokens, not the conversation's.

    Safe to use from several threads.
    """

    def __init__(self, n_kept: int = 8) -> None:
        self._kept: deque[Chain] = deque(maxlen=n_kept)
        self._lock = threading.Lock()

    def chain(self, root: Key, tokens: Tokens, block_tokens: int) -> Chain:
        """The chain over `tokens`, with the keys that it shares with one that was asked for lately."""
        made = Chain(root, tokens, block_tokens)
        with self._lock:
            kept = [other for other in self._kept if other.root == root and other.block_tokens == block_tokens]
        best, most = None, 0
        for other in reversed(kept):
            shared = common_prefix(other.tokens, tokens)
            if shared > most:
                best, most = other, shared
        if best is not None:
            made.begin_with(best, most // block_tokens)
        if best is None or most < len(tokens):
            with self._lock:
                if best is not None and most == len(best.tokens) and best in self._kept:
                    self._kept.remove(best)
                self._kept.append(made)
        return made


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens `a` and `b` share from the first on."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def ordered(tokens: Tokens) -> bytes:
    """`tokens` as bytes that sort as the token ids do; of a prefix, the bytes are a prefix."""
    return b"".join(map(_ordered_one, tokens.tolist()))


def _ordered_one(token: int) -> bytes:
    # The first byte says how many follow, so that no code is a prefix of another one.
    if token >= 0:
        width = (token.bit_length() + 7) // 8
        return bytes((0x80 + width,)) + token.to_bytes(width, "big")
    width = max(1, ((-token - 1).bit_length() + 7) // 8)
    return bytes((0x80 - width,)) + (token + (1 << (8 * width))).to_bytes(width, "big")


def from_ordered(data: bytes) -> Tokens:
    """The tokens whose ordered form is `data`.

    Raises:
        ValueError: when `data` is no such form.
    """
    out: list[int] = []
    at = 0
    while at < len(data):
        sign = data[at] - 0x80
        width = abs(sign)
        body = data[at + 1 : at + 1 + width]
        if width > 8 or len(body) != width:
            raise ValueError("no ordered form of tokens")
        value = int.from_bytes(body, "big")
        out.append(value if sign >= 0 else value - (1 << (8 * width)))
        at += 1 + width
    if any(not _MIN <= token <= _MAX for token in out):
        raise ValueError("no ordered form of tokens")
    return np.array(out, dtype="<i8")
