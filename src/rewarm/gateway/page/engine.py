"""What the page needs of the gateway: models, their states, and replies as they come. Knows no page.

`Models` is the face; the gateway fills it in, and so do the page's tests.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class State(enum.StrEnum):
    """What a model is doing."""

    STOPPED = "stopped"
    PREPARING = "preparing"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model as the page shows it.

    Attributes:
        name: on the API.
        state: what it is doing.
        message: more about it, for a person; why it failed; or "".
        progress: the part of the preparation that is done, 0 to 1, where that is known.
    """

    name: str
    state: State
    message: str = ""
    progress: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt is being processed: `n_done` of `n_tokens` tokens."""

    n_done: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the reply, or of the model's thinking before it."""

    text: str
    is_thought: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The reply's last word: the object `rewarm` beside `usage`, and why it ended ("stop", "length")."""

    report: Mapping[str, Any] | None
    finish_reason: str


Event = Reading | Text | Ended


class Trouble(Exception):
    """A reply that could not be made, in words for a person: what happened and what to do."""


class Models(Protocol):
    """The models of a gateway."""

    def views(self) -> Sequence[ModelView]:
        """All models, in the order to offer them; quick, asked many times a second."""
        ...

    async def load(self, name: str) -> None:
        """Return when the model can answer.

        Raises:
            Trouble: it cannot be loaded.
        """
        ...

    async def unload(self, name: str) -> None:
        """Stop the model and free its memory; what it holds is written first."""
        ...

    def chat(self, name: str, messages: Sequence[Mapping[str, str]]) -> AsyncIterator[Event]:
        """Ask for a reply; events as they come. Closing the iterator stops the model.

        Raises:
            Trouble: while iterating: there will be no more of the reply.
        """
        ...
