"""What the page needs of the gateway: models, their states, and replies as they come. Knows no page.

`Models` is the face; the gateway fills it in, and so do the page's tests.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        source: where it was found: `given`, `bundled`, `huggingface`, `lm-studio` or `ollama`.
        engine: what runs it: `mlx-lm` or `llama.cpp`.
        nbytes: of its weights; 0 where that is not known.
        memory_bytes: that its worker takes, while it runs.
        why_not: why it cannot be loaded here; "" when it can.
        options: how it is run.
        reload_needed: whether it runs with other options than these.
        log: the last lines that it printed, when it failed.
    """

    name: str
    state: State
    message: str = ""
    progress: float | None = None
    source: str = "given"
    engine: str = ""
    nbytes: int = 0
    memory_bytes: int = 0
    why_not: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    reload_needed: bool = False
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Effect:
    """What a change of how a model is run does.

    Attributes:
        new_cache: what was kept of it cannot be used any more.
        left_bytes: how much of that there is; it stays.
    """

    new_cache: bool
    left_bytes: int


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


@dataclass(frozen=True, slots=True)
class Ask:
    """What a reply is asked for with.

    Attributes:
        messages: the prompt, with `role` and `content`.
        label: names what the cache keeps of it; "" for nothing.
        is_private: the cache neither reads nor keeps anything of it.
        temperature: None for the default.
        max_tokens: of the reply; None for the default.
    """

    messages: Sequence[Mapping[str, str]]
    label: str = ""
    is_private: bool = False
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What the cache keeps of one conversation and of nothing else.

    Attributes:
        n_entries: ends of it that are named.
        n_files: records.
        nbytes: of these; at least so many, where there are several entries that share some with each other.
    """

    n_entries: int
    n_files: int
    nbytes: int


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

    def chat(self, name: str, ask: Ask) -> AsyncIterator[Event]:
        """Ask for a reply; events as they come. Closing the iterator stops the model.

        Raises:
            Trouble: while iterating: there will be no more of the reply.
        """
        ...

    async def kept(self, label: str) -> Kept:
        """What forgetting the entries of that label would erase.

        Raises:
            Trouble: the cache cannot be used now.
        """
        ...

    async def forget(self, label: str) -> Kept:
        """Erase the entries of that label, and all that only they need; what was erased.

        Raises:
            Trouble: the cache cannot be used now; nothing, or a part, was erased.
        """
        ...

    def details(self) -> Sequence[ModelView]:
        """As `views`, with all that the Models page tells: memory and options too; asked now and then."""
        ...

    async def scan(self) -> None:
        """Look for models again."""
        ...

    async def change(self, name: str, changes: Mapping[str, Any], *, dry_run: bool) -> Effect:
        """Run a model otherwise, from when it is loaded next; with `dry_run`, only say what that does.

        Raises:
            Trouble: the options make no sense, or cannot be kept. Nothing was changed.
        """
        ...
