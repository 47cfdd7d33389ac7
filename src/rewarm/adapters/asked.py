"""What a request asks of the cache, by its `X-Rewarm-` headers. Values only; knows no engine."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_LABEL = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TENANT_NBYTES = 64


class Mode(enum.StrEnum):
    """What a request may do with the cache: the values of the header `X-Rewarm-Cache`."""

    ON = "on"
    READ_ONLY = "read-only"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's headers ask of the cache.

    Attributes:
        mode: what it may do.
        label: the conversation's name, which becomes the entries' label; or None.
        tenant: whose it is; nothing is shared between tenants.
        at: when the request came, by `time.monotonic`.
    """

    mode: Mode = Mode.ON
    label: str | None = None
    tenant: bytes = b""
    at: float = field(default_factory=time.monotonic, compare=False)


def read_headers(header: Callable[[str], str | None], *, trusted: bool) -> Asked:
    """What the `X-Rewarm-` headers of a request ask for.

    Args:
        header: looks one up by its name.
        trusted: whether the gateway sent it: the tenant is its to tell, and ignored from anybody else.

    Raises:
        ValueError: a header makes no sense; says which, and what it may be.
    """
    mode, label, tenant = (header(f"X-Rewarm-{name}") for name in ("Cache", "Conversation", "Tenant"))
    if mode is not None and mode not in set(Mode):
        raise ValueError(f"X-Rewarm-Cache is on, read-only or off, not {mode!r}")
    if label is not None and _LABEL.fullmatch(label) is None:
        raise ValueError("X-Rewarm-Conversation is 1 to 128 letters, digits and any of . _ : -")
    owner = b""
    if trusted and tenant is not None:
        try:
            owner = bytes.fromhex(tenant)
        except ValueError:
            raise ValueError("X-Rewarm-Tenant is a hexadecimal number") from None
        if len(owner) > _MAX_TENANT_NBYTES:
            raise ValueError(f"X-Rewarm-Tenant has at most {_MAX_TENANT_NBYTES} bytes")
    return Asked(Mode(mode or Mode.ON), label, owner)
