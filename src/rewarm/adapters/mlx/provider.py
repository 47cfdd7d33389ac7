"""mlx-lm's model provider: knows each model's identity before its files are read, and its share of the cache.

All of it runs on the generation thread. Knows nothing of requests and of what the engine keeps in memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.server as engine
from mlx_lm.generate import batch_generate, stream_generate
from mlx_lm.utils import _download

from rewarm.adapters.mlx import codec, identity
from rewarm.adapters.mlx.disk_tier import DiskTier
from rewarm.cache.identity import Identity
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Reason

log = logging.getLogger(__name__)

_IDENTITY_WAIT_S = 5.0
"""At the start, before any request: how long to wait for the weights' hash."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model that the engine has loaded.

    Attributes:
        key: the engine's own key, of names.
        stamp: what its files looked like before they were read: the same names with other files are another
            model, for the memory tier too.
        tier: its share of the disk, or None.
        why_not: why there is no tier.
        folders: of the model and its adapter.
        draft: the draft model, or None.
    """

    key: Any
    stamp: identity.Stamp
    tier: DiskTier | None
    why_not: tuple[Reason, str]
    folders: Sequence[Path] = ()
    draft: str | None = None


class NoModel(Exception):
    """The model that a request names cannot be loaded."""


class ModelProvider(engine.ModelProvider):
    """Loads models; knows each one's identity before the engine reads its files.

    Attributes:
        loaded: the model in use, or None.
        n_vocab: logits that it gives for each token; 0 where that is not known.
        before_reset: called when the engine ends.
    """

    def __init__(self, cli_args: Any, cache: PrefixCache | None, why_not: tuple[Reason, str]) -> None:
        super().__init__(cli_args)
        self.loaded: Loaded | None = None
        self.n_vocab = 0
        self.before_reset: Callable[[], None] = lambda: None
        self._cache = cache
        self._why_not = why_not
        if cli_args.model:
            # The folder's name and full path name the model too, so that a client may use what it was shown.
            for name in {Path(cli_args.model).name, str(Path(cli_args.model).resolve())}:
                self._model_map.setdefault(name, cli_args.model)
                self._adapter_map.setdefault(name, cli_args.adapter_path)

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        first = self.loaded is None
        # Raises as the engine would for a model that cannot be had, and leaves the one that is loaded alone.
        folders = [Path(path) for path in (_download(model_path), adapter_path) if path is not None]
        self.loaded = None
        before = identity.stamp(folders)
        known, why_not = self._identify(folders, draft_model_path)
        super()._load(model_path, adapter_path, draft_model_path)
        if known is not None and identity.stamp(folders) != before:
            known, why_not = (
                None,
                (Reason.UNAVAILABLE, "The model's files changed while they were being loaded."),
            )
        self.loaded = self._with_tier(Loaded(self.model_key, before, None, why_not, folders, draft_model_path), known)
        if self.loaded.tier is not None and known is not None and first:
            known.wait(_IDENTITY_WAIT_S)
        self.n_vocab = _warm_up(self.model, self.tokenizer, batchable=self.is_batchable)

    def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        """The model and tokenizer that a request names.

        Raises:
            NoModel: they cannot be loaded.
        """
        try:
            return super().load(model_path, adapter_path, draft_model_path)
        except Exception as error:
            log.warning("rewarm: the model that a request names cannot be loaded", exc_info=True)
            raise NoModel(f"The model {model_path!r} cannot be loaded ({type(error).__name__}).") from error

    def is_loaded(self, wanted: Any) -> bool:
        """Whether the model that a request names is the one in use, as far as its names tell."""
        model, adapter, draft = wanted.model, wanted.adapter, wanted.draft
        # As the engine's `load` looks them up.
        names = (
            self._model_map.get(model, model),
            self._adapter_map.get(model, adapter),
            self._draft_model_map.get(draft, draft),
        )
        return bool(self.model_key == names)

    @property
    def cache(self) -> PrefixCache | None:
        """The prefix cache in use."""
        return self._cache

    def use(self, cache: PrefixCache | None, why_not: tuple[Reason, str]) -> None:
        """Let another cache take the place of the present one, or none."""
        self._cache, self._why_not = cache, why_not
        loaded = self.loaded
        if loaded is None:
            return
        known, why_not = self._identify(loaded.folders, loaded.draft)
        if known is not None and identity.stamp(loaded.folders) != loaded.stamp:
            known, why_not = None, (Reason.UNAVAILABLE, "The model's files have changed since they were loaded.")
        self.loaded = self._with_tier(replace(loaded, tier=None, why_not=why_not), known)

    def reset(self) -> None:
        """At the end, on the generation thread: whoever wants to keep something can still do so."""
        self.before_reset()
        super().reset()

    def _with_tier(self, loaded: Loaded, known: Identity | None) -> Loaded:
        """`loaded` with its share of the cache, if it can have one."""
        tier, why_not = None, loaded.why_not
        if known is not None and self._cache is not None:
            quantised_from = self.cli_args.quantized_kv_start if self.cli_args.kv_bits is not None else None
            try:
                tier = DiskTier(self._cache, known, self.model, quantised_from=quantised_from)
            except codec.UnsupportedCache as error:
                why_not = (Reason.DISABLED, f"This model is served uncached: {error}.")
        if tier is None and self._cache is not None:
            log.warning("rewarm: %s", why_not[1])
        return replace(loaded, tier=tier, why_not=why_not)

    def _identify(self, folders: Sequence[Path], draft: str | None) -> tuple[Identity | None, tuple[Reason, str]]:
        """The identity of the model in `folders`, or the reason why it is served uncached."""
        if self._cache is None:
            return None, self._why_not
        if draft is not None:
            return None, (Reason.DISABLED, "With a draft model, requests are served uncached.")
        if self.is_distributed:
            return None, (Reason.DISABLED, "With more than one machine, requests are served uncached.")
        names = ("kv_bits", "kv_group_size", "quantized_kv_start")
        kv = {name: getattr(self.cli_args, name, None) for name in names}
        settings = kv if kv["kv_bits"] is not None else {}
        model, adapter = folders[0], folders[1] if len(folders) > 1 else None
        try:
            return identity.from_files(model, adapter, settings), (Reason.HIT, "")
        except OSError as error:
            return None, (Reason.UNAVAILABLE, f"The model's files cannot be read: {error}.")


def _warm_up(model: Any, tokenizer: Any, *, batchable: bool) -> int:
    """Evaluate a few tokens, so that the first request does not pay for compiling MLX's kernels.

    Returns:
        How many logits the model gives for a token; 0 when it failed.
    """
    tokens = [next(iter(tokenizer.eos_token_ids), 0)] * 4
    try:
        if batchable:
            batch_generate(model, tokenizer, [tokens], max_tokens=2)
        else:
            list(stream_generate(model, tokenizer, tokens, max_tokens=2))
    except Exception:
        log.warning("rewarm: warming up failed; the first request will be slower", exc_info=True)
        return 0
    return int(model(mx.array([tokens[:1]])).shape[-1])
