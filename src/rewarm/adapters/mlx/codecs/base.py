"""What a codec of one cache class is."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from rewarm.adapters.mlx.codecs.tensors import Given, Taken


class CacheCodec(Protocol):
    """Takes one cache apart and puts it together.

    Attributes:
        attributes: all that an object of the class holds; one that holds anything else is refused.
    """

    attributes: frozenset[str]

    def n_tokens(self, cache: Any) -> int | None:
        """How many tokens `cache` holds: 0 for a fresh one, None where the class does not count them."""
        ...

    def arrays(self, cache: Any) -> list[mx.array]:
        """What must be evaluated before `encode`."""
        ...

    def encode(self, cache: Any, taken: Taken) -> None:
        """Put the tensors of the first `taken.n_tokens` tokens into `taken`.

        Raises:
            UnsupportedCache: the cache is in a state that cannot be taken apart, or cannot be cut there.
        """
        ...

    def decode(self, given: Given, fresh: Any) -> Any:
        """A new cache that holds what is given.

        Args:
            given: tensors and values.
            fresh: the model's own empty cache at this place.

        Raises:
            UnsupportedCache: the state was not made from such a cache.
        """
        ...
