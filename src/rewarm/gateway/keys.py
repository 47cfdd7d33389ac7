"""API keys: who a request comes from, and which tenant that is. Knows no request and no worker.

Keys are kept as digests and compared in constant time. A tenant is a digest of its key under another name, so
that what is written nowhere cannot be told from what is.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from rewarm.errors import GatewayError

COOKIE = "rewarm-key"
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_RIGHTS = frozenset({"share", "admin"})


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever asks.

    Attributes:
        tenant: nothing is shared between two of them; empty: the common one.
        is_admin: whether it may use `/api`, `/metrics` and the pages, which show everybody's.
    """

    tenant: bytes = b""
    is_admin: bool = True


NOBODY_ELSE = Client()
"""Who asks where no keys are set: this machine's user."""


class Keys:
    """The keys of one gateway.

    Args:
        texts: `KEY`, `KEY:share` (uses the common cache), `KEY:admin`, or both; the first key is an admin's anyway.

    Raises:
        GatewayError: one of them is none; it is not repeated in the message.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._clients: list[tuple[bytes, bytes, Client]] = []
        for number, text in enumerate(texts):
            key, *rights = text.strip().split(":")
            if _KEY.fullmatch(key) is None or not _RIGHTS.issuperset(rights):
                raise GatewayError(
                    f"API key {number + 1} makes no sense: a key is 16 to 256 letters, digits and any of . _ ~ + / = - "
                    "and perhaps followed by :share or :admin."
                )
            tenant = b"" if "share" in rights else _digest(key, "tenant")
            client = Client(tenant, is_admin=number == 0 or "admin" in rights)
            self._clients.append((_digest(key, "key"), _digest(key, "cookie"), client))

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._clients)

    def of_key(self, given: str) -> Client | None:
        """Whose key it is; None where it is nobody's. Takes as long whichever it is."""
        return self._find(_digest(given, "key"), 0)

    def of_cookie(self, given: str) -> Client | None:
        """Whose cookie it is."""
        try:
            return self._find(bytes.fromhex(given), 1)
        except ValueError:
            return None

    def cookie(self, given: str) -> str:
        """What a browser keeps in the key's place: worth as much here, and nothing elsewhere."""
        return _digest(given, "cookie").hex()

    def _find(self, wanted: bytes, column: int) -> Client | None:
        found: Client | None = None
        for row in self._clients:
            digest = row[0] if column == 0 else row[1]
            if hmac.compare_digest(digest, wanted) and found is None:
                found = row[2]
        return found


def _digest(key: str, purpose: str) -> bytes:
    return blake3(key.encode("utf-8", "replace"), derive_key_context=f"rewarm gateway 1 {purpose}").digest()
