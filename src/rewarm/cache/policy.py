"""Every rule that a user can switch, with its default. Values only: who applies a rule is said at each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

log = logging.getLogger("rewarm.cache")

_told: set[tuple[str, str]] = set()
"""What this process has been warned of: stored rules that cannot be understood, by name and value."""


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
        paused: seams neither read nor write (reason `disabled`); what is stored stays.
        save_at: when a seam hands the end of a conversation over to `save`: at every reply's end (`turn`), when
            its engine has nothing to do (`idle`), or when the model is unloaded (`unload`).
    """

    load: Literal["worth", "always"] = "worth"
    min_tokens: int = 0
    second_sight: bool = False
    write_bytes_per_day: int | None = None
    keep_days: float | None = None
    thin: bool = True
    paused: bool = False
    save_at: Literal["turn", "idle", "unload"] = "turn"

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
    """The rules in `store.json`; one that is not understood has its default, and is warned of once per process.

    Names that this version does not know are a later version's, and left alone.
    """
    rules: dict[str, Any] = {}
    for field in msgspec.structs.fields(Policy):
        if field.name not in stored:
            continue
        try:
            rule = {field.name: msgspec.convert(stored[field.name], field.type)}
            Policy(**rule).check()
        except ValueError as error:  # msgspec's ValidationError is one
            _warn(field.name, stored[field.name], str(error))
        else:
            rules |= rule
    return Policy(**rules)


def _warn(name: str, value: object, why: str) -> None:
    said = (name, repr(value))
    if said not in _told:
        _told.add(said)
        log.warning(
            "the rule %r in store.json is %.100r, which makes no sense (%s): its default holds", name, value, why
        )
