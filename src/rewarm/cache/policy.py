"""Every rule that a user can switch, with its default. Values only: who applies a rule is said at each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The switchable rules of a root; kept in `store.json`, read anew by every process.

    Attributes:
        load: what a server restores: `worth`, what is quicker to load than to prefill, as far as both have been
            measured; or `always`, whatever is longer than what its engine holds.
        min_tokens: shorter states are not saved.
        second_sight: a block is written when it is saved for the second time only.
        write_bytes_per_day: bytes of records that may be written on one day (UTC), or None.
        keep_days: entries that nobody has matched for so many days are forgotten, but for pinned ones and those
            that have a time of their own; None keeps them.
        thin: of layouts that cannot be cut, only some restore points of a conversation are kept.
    """

    load: Literal["worth", "always"] = "worth"
    min_tokens: int = 0
    second_sight: bool = False
    write_bytes_per_day: int | None = None
    keep_days: float | None = None
    thin: bool = True

    def check(self) -> None:
        """Refuse values that make no sense.

        Raises:
            ValueError: a number is negative.
        """
        for name in ("min_tokens", "write_bytes_per_day", "keep_days"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**63:
                raise ValueError(f"{name} must be 0 or more, not {value}")


def read_policy(stored: Mapping[str, Any]) -> Policy:
    """The rules in `store.json`; one that is not understood has its default."""
    rules: dict[str, Any] = {}
    for field in msgspec.structs.fields(Policy):
        if field.name in stored:
            try:
                rules[field.name] = msgspec.convert(stored[field.name], field.type)
            except msgspec.ValidationError:
                continue
    return Policy(**rules)
