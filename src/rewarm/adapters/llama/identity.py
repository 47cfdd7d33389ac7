"""What the KV of a model in llama.cpp depends on: its files, the flags that change it, and the engine's build.

The files are looked at before the engine reads them (`Before`), the rest is known when it runs. Knows nothing
of slots and requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewarm.adapters.llama import codec, gguf_facts
from rewarm.adapters.llama.flags import Flags, adapters
from rewarm.adapters.llama.gguf_facts import Facts
from rewarm.cache import model_files
from rewarm.cache.identity import Identity
from rewarm.cache.model_files import Model, NoIdentity

ENGINE = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the running engine made of its flags.

    Attributes:
        build: one line that names the program's version.
        flash_attention: "on" or "off"; "" where a slot file does not tell.
        n_ctx: tokens that one slot holds.
    """

    build: str
    flash_attention: str
    n_ctx: int


class Before:
    """The model's files as they were before the engine read them.

    Args:
        flags: the user's; they name a model.

    Attributes:
        facts: of the model's header.

    Raises:
        OSError: a file cannot be looked at.
        ValueError: one is no GGUF file, or a flag makes no sense.
        NoIdentity: one is of no known kind.
    """

    def __init__(self, flags: Flags) -> None:
        self._flags = flags
        self._model = Path(flags.value("--model"))
        self.facts: Facts = gguf_facts.read(self._model)
        self._loras = _scaled(flags, "--lora")
        self._vectors = _scaled(flags, "--control-vector")
        projector = flags.value("--mmproj")
        self._projector = Path(projector) if projector else None
        extra = [] if self._projector is None else [self._projector]
        paths = [self._model, *(path for path, _ in (*self._loras, *self._vectors)), *extra]
        self._files: list[Model] = [model_files.scan(path) for path in paths]

    def identity(self, resolved: Resolved) -> Identity:
        """The identity of the model as the engine runs it; its files are hashed in the background."""
        parts: dict[str, Any] = {} if self._projector is None else {"projector": self._projector}
        if self._vectors:
            # Adapters have one order; where the control vectors begin in it is told apart here.
            parts["n_loras"] = len(self._loras)
        if self.facts.long_rope:
            # The factors are chosen by the size of the context.
            parts["n_ctx"] = resolved.n_ctx
        return Identity.from_model(
            self._model,
            adapters=[*self._loras, *self._vectors],
            engine=ENGINE,
            engine_epoch=resolved.build,
            codec=codec.VERSION,
            flash_attention=resolved.flash_attention,
            flags=self._flags.relevant(),
            **parts,
        )

    def unchanged(self) -> bool:
        """Whether the files are still what they were, without reading them."""
        try:
            for found in self._files:
                found.check()
        except (OSError, NoIdentity):
            return False
        return True


def _scaled(flags: Flags, name: str) -> list[tuple[Path, float]]:
    """Files and scales of an adapter's flag and of its `-scaled` form, in the order of the command line."""
    found: list[tuple[Path, float]] = []
    for flag in (*flags.ambient, *flags.given):
        if flag.name in (name, f"{name}-scaled"):
            found += adapters(flag, scaled=flag.name.endswith("-scaled"))
    return found
