"""The story that `rewarm demo` tells: a conversation, its end, and what its next turn costs.

Knows how a worker is asked, not which engine runs in it: the caller says how to start one for a cache
folder. Prints nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewarm.cli.worker import Message, Reply, Worker

MAX_TOKENS = 24

SYSTEM = """\
You are the guide of a small geography museum. Visitors ask you short questions and you answer each of them in \
one short sentence, in plain words, with the one fact that was asked for and nothing else.

These are the rooms of the museum. The first room is about Europe: its rivers, its mountains, and its capitals. \
The second room is about Asia, with a large model of the Himalayas and a collection of old sea maps. The third \
room is about Africa and shows the course of the Nile from its springs to the sea. The fourth room is about the \
Americas; there you find the Andes, the Amazon and the great lakes. The fifth room is about Oceania and its \
islands. The last room is about the poles, where it is kept cold on purpose, so take a coat with you.

The museum is open every day from nine in the morning to six in the evening, and until eight on Thursdays. \
Children pay nothing, students pay half, and everyone pays nothing on the first Sunday of a month. The café \
on the ground floor serves soup, bread and cake. Bags are left in the lockers beside the entrance, pictures may \
be taken without a flash, and dogs wait outside, where there is always a bowl of fresh water for them.

Be friendly and calm. When a visitor asks about a country, name its capital, its longest river or its highest \
mountain, whichever was asked for. When you do not know an answer, say so and send the visitor to the library \
on the second floor, where the librarian is glad to help."""

_THINGS = ("an old map", "a model of a bridge", "a stone from a mountain", "a jar of river sand", "a painted globe")
_PLACES = ("Spain", "Norway", "Egypt", "Kenya", "India", "Japan", "Peru", "Canada", "Fiji", "Greenland")
_CASES = " ".join(
    f"Case {n} shows {_THINGS[n % len(_THINGS)]} from {_PLACES[n % len(_PLACES)]}, found {n} years ago."
    for n in range(1, 61)
)
LONG_SYSTEM = f"{SYSTEM}\n\nThis is the list of the show cases. {_CASES}"
"""Some 1,500 tokens, for engines that read the short one in a moment."""

FIRST = "What is the capital of France?"
SECOND = "And what is the capital of Italy?"

StartWorker = Callable[[Path | None], Sequence[str]]
"""The command of a worker that keeps its cache in a folder; with None, one whose cache is off."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Story:
    """What the four runs gave.

    Attributes:
        cold: the first turn, in an empty store.
        restored: the second turn, after the worker was ended and started again.
        uninterrupted: the second turn in a process that never stopped.
        reference: the second turn alone, with the cache off.
    """

    cold: Reply
    restored: Reply
    uninterrupted: Reply
    reference: Reply

    @property
    def speedup(self) -> float:
        """How many times sooner the first piece of text came than with the cache off."""
        return self.reference.ttft_s / self.restored.ttft_s

    @property
    def identical(self) -> bool:
        """Whether the restart changed nothing: the same text as without it."""
        return self.restored.text == self.uninterrupted.text


def tell(start: StartWorker, progress: Progress, system: str = SYSTEM) -> Story:
    """Run the story in temporary stores, which are gone afterwards, as is every worker.

    Args:
        start: how to start a worker.
        progress: told what comes next.
        system: the system prompt of the conversation.

    Raises:
        EngineError: a worker could not be started, or did not answer.
    """
    first: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": FIRST}]
    with tempfile.TemporaryDirectory(prefix="rewarm-demo-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        log = work / "worker.log"

        progress("cold: the first turn, in an empty store")
        with Worker(start(work / "restarted"), log) as worker:
            cold = worker.chat(first, MAX_TOKENS)

        progress("restored: a new process goes on with the conversation")
        with Worker(start(work / "restarted"), log) as worker:
            restored = worker.chat(_second(first, cold), MAX_TOKENS)

        progress("uninterrupted: both turns in one process, in another empty store")
        with Worker(start(work / "uninterrupted"), log) as worker:
            uninterrupted = worker.chat(_second(first, worker.chat(first, MAX_TOKENS)), MAX_TOKENS)

        progress("reference: the second turn alone, with the cache off")
        with Worker(start(None), log) as worker:
            reference = worker.chat(_second(first, cold), MAX_TOKENS)

    return Story(cold, restored, uninterrupted, reference)


def _second(first: Sequence[Message], reply: Reply) -> list[Message]:
    return [*first, {"role": "assistant", "content": reply.text}, {"role": "user", "content": SECOND}]
