"""Every rule that a user can switch. So far one: whether a server loads what it finds."""

from __future__ import annotations

from typing import Literal

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The switchable rules of a root.

    Attributes:
        load: `always`: a server restores whatever is longer than what its engine holds.
    """

    load: Literal["always"] = "always"
