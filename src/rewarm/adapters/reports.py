"""What a worker tells of one request: the object `rewarm` beside a reply's `usage`.

Every engine's seam fills it in; it knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rewarm.cache.explain import said_of_drop
from rewarm.state.reason import Reason


@dataclass(frozen=True, slots=True)
class Report:
    """What the cache did for one request.

    Attributes:
        cached_tokens: prompt tokens that were not evaluated.
        disk_tokens: those of them that came from the disk.
        memory_tokens: those that the engine still held.
        prompt_tokens: all of the prompt.
        reason: why not more; a `Reason`'s value.
        detail: the same as a sentence, or "".
        restore_s: seconds spent on finding and restoring.
        saved_s: seconds of prefill that reuse has saved, less what it took, as estimated; 0 where it is not known.
    """

    cached_tokens: int = 0
    disk_tokens: int = 0
    memory_tokens: int = 0
    prompt_tokens: int = 0
    reason: str = Reason.NOTHING_STORED.value
    detail: str = ""
    restore_s: float = 0.0
    saved_s: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def explain(reason: Reason, detail: Mapping[str, Any]) -> str:
    """`reason` as a sentence for a person, with the evidence in `detail`; "" where nothing is to explain."""
    at, restorable, fields = (detail.get(name, "?") for name in ("at", "restorable", "fields"))
    why = detail.get("identity") or detail.get("error")
    sentences = {
        Reason.HIT: "",
        Reason.DIVERGED: f"The prompt differs from what is stored from token {at} on.",
        Reason.NOTHING_STORED: f"Nothing more is stored for this prompt.{said_of_drop(detail)}",
        Reason.NO_RESTORE_POINT: f"The stored state can be taken up at token {restorable} only.",
        Reason.EVICTED: "The rest was evicted to make room.",
        Reason.CORRUPT: "A damaged record was found and set aside; the part from there on is computed anew.",
        Reason.IDENTITY_CHANGED: f"Not the model that the stored state was made with: {fields} changed.",
        Reason.IDENTITY_PENDING: "The model's files are still being hashed.",
        Reason.UNAVAILABLE: f"The cache cannot be used now{f': {why}' if why else ''}.",
        Reason.TIMEOUT: "The disk took too long.",
        Reason.DISABLED: "The disk cache is off for this request.",
        Reason.BUSY: "Not enough memory is free to restore.",
        Reason.NOT_WORTH_LOADING: "Evaluating the rest of the prompt is quicker than loading it.",
    }
    return sentences.get(reason, str(reason))
