"""The seam in `mlx_lm.server`: its prompt cache, model provider and generator, with the disk beneath.

mlx-lm's own memory tier stays as it is and answers first; the disk serves when it has more. All methods
here run on the generation thread, but for those that say otherwise. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.server as engine
from mlx_lm.generate import batch_generate, stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.utils import _download

from rewarm.adapters.mlx import codec, identity
from rewarm.adapters.mlx.bodies import BadRequest
from rewarm.adapters.mlx.disk_tier import DiskTier
from rewarm.adapters.reports import Report
from rewarm.cache.identity import Identity
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.state.reason import Boundary, Reason

log = logging.getLogger(__name__)

_IN_FLIGHT = 64
"""Prompts remembered, to tell a prompt's end from a reply's end."""

_MOST_FAILURES = 4
_FAILURES_WITHIN_S = 60.0
"""So many failures of the engine within this time end the process: it is not one request's fault then."""

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
    """

    key: Any
    stamp: identity.Stamp
    tier: DiskTier | None
    why_not: tuple[Reason, str]


class NoModel(Exception):
    """The model that a request names cannot be loaded."""


class ModelProvider(engine.ModelProvider):
    """Loads models; knows each one's identity before the engine reads its files.

    Attributes:
        loaded: the model in use, or None.
        n_vocab: logits that it gives for each token; 0 where that is not known.
    """

    def __init__(self, cli_args: Any, cache: PrefixCache | None, why_not: tuple[Reason, str]) -> None:
        super().__init__(cli_args)
        self.loaded: Loaded | None = None
        self.n_vocab = 0
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
        tier = None
        if known is not None and self._cache is not None:
            try:
                tier = DiskTier(self._cache, known, self.model)
            except codec.UnsupportedCache as error:
                why_not = (Reason.DISABLED, f"This model is served uncached: {error}.")
        if tier is None and self._cache is not None:
            log.warning("rewarm: %s", why_not[1])
        self.loaded = Loaded(self.model_key, before, tier, why_not)
        if tier is not None and known is not None and first:
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


class StoredPromptCache(engine.LRUPromptCache):
    """mlx-lm's memory tier, and the disk beneath it.

    Args:
        max_size: sequences held in memory.
        provider: knows the model in use.

    Attributes:
        keep_rest: tokens that the next fetch must leave to evaluate: 1, or more where penalties look back.
    """

    def __init__(self, max_size: int, provider: ModelProvider) -> None:
        super().__init__(max_size)
        self.keep_rest = 1
        self._provider = provider
        self._prompts: deque[list[int]] = deque(maxlen=_IN_FLIGHT)
        self._report = Report()
        self._context: Any = None
        self._to_forget = threading.Event()

    def forget_soon(self, _: object) -> None:
        """A conversation was forgotten (any thread): hold nothing more, from the generation thread's next look on.

        All of it, not only what was forgotten: the rest comes back from disk when it is asked for.
        """
        self._to_forget.set()

    def let_go(self) -> None:
        """On the generation thread: hold nothing more of what was to be forgotten."""
        if self._to_forget.is_set():
            self._to_forget.clear()
            self._prompts.clear()
            self.trim_to(n_sequences=0)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """The longest known prefix's caches and the rest of `tokens`, of at least `keep_rest` tokens."""
        loaded = self._provider.loaded
        if loaded is not None and loaded.tier is not None:
            loaded.tier.heed()
        self.let_go()
        at_most = max(0, len(tokens) - self.keep_rest)
        caches, rest = super().fetch_nearest_cache(self._key(model), tokens)
        n_memory = len(tokens) - len(rest)
        if caches is None or n_memory > at_most:
            caches, n_memory = _shortened(caches, n_memory, at_most)
        self._prompts.append(tokens[:])
        try:
            caches, report = self._fetch_from_disk(model, tokens, caches, n_memory, at_most)
        except Exception:
            # The last line of defence: whatever goes wrong in the cache, the request is served without it.
            log.exception("rewarm: fetching failed; the request is served without the disk")
            report = _memory_report(n_memory, len(tokens), Reason.UNAVAILABLE, "The disk cache failed; see the log.")
        self._tell(report)
        return caches, tokens[report.cached_tokens :]

    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        """Keep a state in memory; at a system's end and at a reply's end on disk too."""
        boundary = self._boundary(tokens, cache_type)
        loaded = self._provider.loaded
        if boundary is not None and loaded is not None and loaded.tier is not None and loaded.key == model:
            try:
                if not _has_images(tokens):
                    loaded.tier.save(tokens, prompt_cache, boundary)
            except Exception:
                # As above: a reply that was given is not taken back because it could not be kept.
                log.exception("rewarm: saving failed; this reply is not kept on disk")
        super().insert_cache(self._key(model), tokens, prompt_cache, cache_type=cache_type)

    def begin(self, context: Any) -> None:
        """Attach the report of this request to `context`: the last fetch's, or the next one's to come."""
        context.rewarm = self._report
        self._context = context

    def expect_fetch(self) -> None:
        """The engine will make its context before it fetches: forget the last report."""
        self._report = Report()

    def _tell(self, report: Report) -> None:
        self._report = report
        if self._context is not None and self._context.prompt_cache_count < 0:
            self._context.rewarm = report
        self._context = None

    def _fetch_from_disk(
        self, model: Any, tokens: list[int], caches: list[Any] | None, n_memory: int, at_most: int
    ) -> tuple[list[Any] | None, Report]:
        loaded = self._provider.loaded
        if loaded is None or loaded.tier is None or loaded.key != model:
            why = loaded.why_not if loaded is not None else (Reason.UNAVAILABLE, "")
            return caches, _memory_report(n_memory, len(tokens), *why)
        if _has_images(tokens):
            why = (Reason.DISABLED, "Requests with images are served without the disk cache.")
            return caches, _memory_report(n_memory, len(tokens), *why)
        if at_most == 0:
            return None, _memory_report(0, len(tokens), Reason.TOO_SHORT, "All of this prompt must be evaluated.")
        found = loaded.tier.restore(tokens, at_most=at_most, longer_than=n_memory)
        if found.caches is None:
            reason, detail = (Reason.HIT, "") if n_memory == at_most else (found.reason, found.detail)
            return caches, _memory_report(n_memory, len(tokens), reason, detail, found.took_s)
        n = found.n_tokens
        return found.caches, Report(n, n, 0, len(tokens), found.reason.value, found.detail, found.took_s)

    def _boundary(self, tokens: list[int], cache_type: str) -> Boundary | None:
        """What ends here for the disk. Inside a prompt only a system's end does: rows can be cut anywhere."""
        n = len(tokens)
        if cache_type == "system":
            return Boundary.SYSTEM
        if any(len(prompt) > n and prompt[:n] == tokens for prompt in self._prompts):
            return None
        answered = next((prompt for prompt in self._prompts if tokens[: len(prompt)] == prompt), None)
        if answered is not None:
            self._prompts.remove(answered)
        return Boundary.ASSISTANT

    def _key(self, model: Any) -> Any:
        loaded = self._provider.loaded
        return (model, loaded.stamp) if loaded is not None and loaded.key == model else model


class ResponseGenerator(engine.ResponseGenerator):
    """mlx-lm's generator; tells each request's context what the cache did for it.

    Args:
        provider: loads models.
        prompt_cache: both tiers.
        on_end: called on the generation thread when it ends by itself, with what went wrong.

    Attributes:
        ready: set when the model of the command line is loaded, or at once if there is none.

    What a request makes the engine fail at ends that request, and where the engine's loop is torn down with it,
    those that were served beside it; the next ones find it running again.
    """

    def __init__(self, provider: ModelProvider, prompt_cache: StoredPromptCache, on_end: Callable[[str], None]) -> None:
        self.ready = threading.Event()
        self._on_end = on_end
        self._ended = False
        self._open = weakref.WeakSet[_ContextQueue]()
        super().__init__(provider, prompt_cache)

    @property
    def is_healthy(self) -> bool:
        """Whether a request can be served now (any thread)."""
        return self.ready.is_set() and not self._ended and self._generation_thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """Ask the generation thread to end and wait for it; False if it is still busy (any thread)."""
        self._stop = True
        self._generation_thread.join(timeout)
        return not self._generation_thread.is_alive()

    def _generate(self) -> None:
        try:
            # The engine loads the default model first thing in here; loading it now makes that a no-op and tells
            # when the model is there.
            self.model_provider.load_default()
            self.ready.set()
            self._generate_on()
        except Exception as error:
            self._ended = True
            self._on_end(f"{type(error).__name__}: {error}")
            raise

    def _generate_on(self) -> None:
        """The engine's loop, begun again after a failure, unless it fails again and again."""
        failed: deque[float] = deque(maxlen=_MOST_FAILURES)
        while True:
            try:
                super()._generate()
            except Exception as error:
                failed.append(time.monotonic())
                for queue in list(self._open):
                    queue.put(error)
                if len(failed) == _MOST_FAILURES and failed[-1] - failed[0] < _FAILURES_WITHIN_S:
                    raise
                log.exception("rewarm: the engine failed; the requests that it served have ended, and it goes on")
            else:
                return

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """The prompt's tokens; refuses what the engine would only fail at when other requests are served with it.

        Raises:
            BadRequest: the request makes no sense for this model.
        """
        try:
            found = super()._tokenize(tokenizer, request, args)
        except Exception as error:
            log.warning("rewarm: a request could not be tokenised", exc_info=True)
            raise BadRequest(f"The prompt cannot be made from this request ({type(error).__name__}).") from error
        if not len(found[0]):
            raise BadRequest("The prompt has no tokens.", "prompt")
        n_vocab = self.model_provider.n_vocab
        if any(token >= n_vocab for token in args.logits.logit_bias or ()):
            raise BadRequest(f"logit_bias names a token id past the model's {n_vocab}.", "logit_bias")
        if n_vocab and args.sampling.top_k >= n_vocab:
            args.sampling.top_k = 0  # every token: no choice is cut
        try:
            self._make_state_machine(self.model_provider.model_key, tokenizer, args.stop_words)
        except Exception as error:
            log.warning("rewarm: a request's stop words could not be used", exc_info=True)
            raise BadRequest(f"stop cannot be used ({type(error).__name__}).", "stop") from error
        return found

    def _next_request(self, timeout: float | None = None) -> Any:
        self.prompt_cache.let_go()
        request = super()._next_request(timeout)
        if request is None:
            return None
        queue, *others = request
        watched = _ContextQueue(queue, self.prompt_cache.begin, self._open.discard)
        self._open.add(watched)
        return (watched, *others)

    def _serve_single(self, request: Any, *stream: Any) -> None:
        _, _, args = request
        self.prompt_cache.keep_rest = _tokens_looked_at(args.logits)
        self.prompt_cache.expect_fetch()
        try:
            super()._serve_single(request, *stream)
        finally:
            self.prompt_cache.keep_rest = 1


class _ContextQueue:
    """A request's queue that shows the context to `begin` on its way to the handler, and its end to `end`."""

    def __init__(self, queue: Any, begin: Callable[[Any], None], end: Callable[[_ContextQueue], None]) -> None:
        self._queue = queue
        self._begin = begin
        self._end = end

    def put(self, item: Any) -> None:
        if isinstance(item, engine.GenerationContext):
            self._begin(item)
        if item is None or isinstance(item, Exception):
            self._end(self)
        self._queue.put(item)


def _tokens_looked_at(logits: Any) -> int:
    """How many prompt tokens the penalties look at.

    Served one at a time, they see only the tokens that the engine evaluates itself: fewer than these, and
    the reply would differ from one that began cold. A context of 0 means all tokens.
    """
    contexts = [1]
    for name in ("repetition", "presence", "frequency"):
        if getattr(logits, f"{name}_penalty"):
            contexts.append(getattr(logits, f"{name}_context_size") or 2**62)
    return max(contexts)


def _shortened(caches: list[Any] | None, n: int, at_most: int) -> tuple[list[Any] | None, int]:
    """`caches` of `n` tokens, cut to `at_most`; none where nothing is left or they cannot be cut."""
    if caches is None or at_most == 0 or not can_trim_prompt_cache(caches):
        return None, 0
    trim_prompt_cache(caches, n - at_most)
    return caches, at_most


def _memory_report(n: int, n_prompt: int, reason: Reason, detail: str, took_s: float = 0.0) -> Report:
    return Report(n, 0, n, n_prompt, reason.value, detail, took_s)


def _has_images(tokens: Sequence[int]) -> bool:
    """mlx-lm puts negative numbers made from an image's content in the place of its tokens."""
    return any(token < 0 for token in tokens)


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
