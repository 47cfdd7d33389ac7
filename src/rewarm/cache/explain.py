"""Why a prompt finds what it finds, with the evidence. Looks only; knows tokens, and text where a decoder is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rewarm.cache.namespace import Namespace
from rewarm.state.chain import as_tokens
from rewarm.state.reason import Reason

CONTEXT = 12
"""Tokens before the place in question that are shown."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a prompt finds, and why not more.

    Attributes:
        n_prompt: tokens of the prompt.
        n_tokens: tokens that would be restored; one at least is always left to evaluate.
        reason: why not more.
        detail: evidence, by name: `at`, `asked_token` and `stored_token` of a divergence; `shared` and
            `restorable` where no later restore point is stored; `fields` of an identity that has changed; `dropped`
            and `dropped_tokens` of a save that this process could not write.
        before: the last tokens before the place in question.
    """

    n_prompt: int
    n_tokens: int
    reason: Reason
    detail: dict[str, Any] = field(default_factory=dict)
    before: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt_tokens": self.n_prompt,
            "restorable_tokens": self.n_tokens,
            "reason": self.reason.value,
            "detail": self.detail,
            "before": list(self.before),
        }

    def sentence(self, decode: Decode | None = None) -> str:
        """The explanation for a person; with `decode`, tokens are shown as text."""
        found = f"{self.n_tokens} of {self.n_prompt} tokens would be restored."
        if self.n_tokens == max(0, self.n_prompt - 1):
            return f"{found} The last one is always evaluated."
        return f"{found} {self._why(decode or _as_numbers)}"

    def _why(self, decode: Decode) -> str:
        detail = self.detail
        if self.reason is Reason.DIVERGED:
            asked, stored = (decode([detail[name]]) for name in ("asked_token", "stored_token"))
            place = f"after {decode(self.before)!r}" if self.before else "at its first token"
            return (
                f"At token {detail['at']}, {place}, the prompt goes on with {asked!r}, "
                f"and what is stored with {stored!r}."
            )
        if self.reason is Reason.NO_RESTORE_POINT:
            return (
                f"{detail['shared']} tokens are stored, but this model's state can be taken up only where a point "
                f"was saved; the last one before that is at {detail['restorable']}."
            )
        return {
            Reason.NOTHING_STORED: "Nothing more is stored for this prompt." + said_of_drop(detail),
            Reason.EVICTED: "The rest was stored, and has been evicted to make room.",
            Reason.CORRUPT: "A record behind that was damaged, and was set aside.",
            Reason.IDENTITY_CHANGED: (
                f"What is stored under this model's name was made by another one: {detail.get('fields')} differ."
            ),
            Reason.IDENTITY_PENDING: "The model's files are still being hashed.",
            Reason.TIMEOUT: "The index took too long to answer.",
        }.get(self.reason, f"The cache cannot be used now ({detail.get('error') or detail.get('identity') or '?'}).")


def said_of_drop(detail: Mapping[str, Any]) -> str:
    """A sentence on the save that was not written, with a blank before it; "" where there was none."""
    if "dropped" not in detail:
        return ""
    return f" A save of {detail['dropped_tokens']} tokens of it was not written: {detail['dropped']}."


def explain(namespace: Namespace, tokens: Iterable[int]) -> Explanation:
    """What `tokens` would find in `namespace` now, and why not more."""
    own = as_tokens(tokens)
    match = namespace.look(own[: max(0, len(own) - 1)])
    at = int(match.detail.get("at", match.n_tokens))
    before = tuple(int(token) for token in own[max(0, at - CONTEXT) : at])
    return Explanation(len(own), match.n_tokens, match.reason, dict(match.detail), before)


def _as_numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))
