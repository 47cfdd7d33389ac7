"""Why no more was found, restored or saved: one word each, for reports, counters and pages."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    """Why a match, a restored state or a save is not longer. `HIT`: nothing more was asked."""

    HIT = "hit"
    DIVERGED = "diverged"
    NOTHING_STORED = "nothing_stored"
    NO_RESTORE_POINT = "no_restore_point"
    EVICTED = "evicted"
    CORRUPT = "corrupt"
    IDENTITY_CHANGED = "identity_changed"
    IDENTITY_PENDING = "identity_pending"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    DISABLED = "disabled"
    TOO_SHORT = "too_short"
    NOT_WORTH_LOADING = "not_worth_loading"
    BUSY = "busy"


class Boundary(enum.StrEnum):
    """What ends at a saved state."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    PREFILL = "prefill"


class Dropped(enum.StrEnum):
    """Why a save, or a part of it, was not written."""

    QUEUE_FULL = "queue_full"
    PARENT_GONE = "parent_gone"
    TOO_LARGE = "too_large"
    NO_SPACE = "no_space"
    NOT_FINITE = "not_finite"
    FORGOTTEN = "forgotten"
    TOO_SHORT = "too_short"
    FIRST_SIGHT = "first_sight"
    WRITE_BUDGET = "write_budget"
    UNAVAILABLE = "unavailable"
    IDENTITY_FAILED = "identity_failed"
    CLOSED = "closed"
    EMPTY = "empty"
