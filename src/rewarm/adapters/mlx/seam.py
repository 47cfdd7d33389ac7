"""The seam in `mlx_lm.server`: its generator, and what the gateway orders of a worker.

Knows requests as far as the engine does, and nothing of HTTP.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm.server as engine
import psutil

import rewarm
from rewarm.adapters.asked import Asked, Mode
from rewarm.adapters.mlx import points
from rewarm.adapters.mlx.ahead import Ahead
from rewarm.adapters.mlx.bodies import BadRequest
from rewarm.adapters.mlx.memory_tier import StoredPromptCache
from rewarm.adapters.mlx.provider import ModelProvider
from rewarm.cache.prefix_cache import PrefixCache
from rewarm.errors import EngineError
from rewarm.state.reason import Reason

log = logging.getLogger(__name__)

_MOST_FAILURES = 4
_FAILURES_WITHIN_S = 60.0
"""So many failures of the engine within this time end the process: it is not one request's fault then."""

_IDLE_S = 2.0
"""For so long no request runs before saves that were put off are made."""

_ORDER_S = 60.0
"""For an order to be carried out by the generation thread, which may be in the middle of a long evaluation."""

_CLOSE_S = 20.0
"""For what waits to be written, before another cache takes the place of the present one."""


@dataclass
class Shared(engine.ModelDescription):
    """What all requests of one batch have in common: the model, the tenant, and what they may do with the cache."""

    tenant: bytes = b""
    mode: Mode = Mode.ON


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
        self._orders: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._idle_since: float | None = None
        engine.BatchGenerator = functools.partial(points.BatchGenerator, prompt_cache.keep_chunk)
        provider.before_reset = lambda: prompt_cache.save_what_waits(at_end=True)
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

    # What the gateway orders: on any thread.

    def use_folder(self, folder: str | None) -> dict[str, Any]:
        """See `rewarm.adapters.control.Worker`."""
        cache = None if folder is None else rewarm.open(Path(folder))
        why = (Reason.DISABLED, "The disk cache is switched off.") if cache is None else (Reason.HIT, "")
        try:
            before = self._order(lambda: self._use(cache, why))
        except BaseException:
            if cache is not None:
                cache.close()
            raise
        unwritten = 0 if before is None else before.close(timeout=_CLOSE_S).unwritten
        return {"dir": None if cache is None else str(cache.root), "unwritten": unwritten}

    def flush(self, timeout_s: float) -> bool:
        """See `rewarm.adapters.control.Worker`."""
        self._order(lambda: self.prompt_cache.save_what_waits(at_end=True))
        cache = self.model_provider.cache
        return cache is None or (cache.flush(timeout_s) and not self.prompt_cache.n_waiting)

    def stats(self) -> dict[str, Any]:
        """See `rewarm.adapters.control.Worker`."""
        cache, memory, n_waiting = self.model_provider.cache, self.prompt_cache, self.requests.qsize()
        return {
            "cache": None if cache is None else cache.stats(),
            "memory_bytes": psutil.Process().memory_info().rss,
            "engine_memory": {"entries": len(memory), "nbytes": memory.nbytes},
            "requests": {"running": len(self._open), "waiting": n_waiting},
        }

    def _use(self, cache: PrefixCache | None, why_not: tuple[Reason, str]) -> PrefixCache | None:
        """On the generation thread: the cache that was in use until now."""
        self.prompt_cache.save_what_waits(at_end=True)
        before = self.model_provider.cache
        self.model_provider.use(cache, why_not)
        if cache is not None:
            cache.on_forget(self.prompt_cache.forget_soon)
        return before

    def _order(self, what: Callable[[], Any]) -> Any:
        """Have `what` done on the generation thread, between two of its steps; what it returns.

        Raises:
            EngineError: the thread did not come to it in time.
        """
        done: Future[Any] = Future()
        self._orders.put((what, done))
        try:
            return done.result(_ORDER_S)
        except TimeoutError:
            if done.cancel():
                raise EngineError("the engine is busy; try again when its requests have ended") from None
            return done.result(_ORDER_S)

    def _carry_out_orders(self) -> None:
        while not self._orders.empty():
            what, done = self._orders.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(what())
                except Exception as error:  # noqa: BLE001 - raised where it is asked for
                    done.set_exception(error)

    # Reading ahead: on the thread that asks.

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """As the engine's; a large state is read before the request is queued, and others go on meanwhile."""
        planned = None
        try:
            planned = self._read_ahead(request, generation_args)
        except Exception:
            # The last line of defence: the request is served all the same.
            log.exception("rewarm: reading ahead failed; the request is served without it")
        generation_args.planned = planned
        try:
            return super().generate(request, generation_args, progress_callback)
        except BaseException:
            if planned is not None:
                planned.release()
            raise

    def _read_ahead(self, request: Any, args: Any) -> Ahead | None:
        provider = self.model_provider
        loaded = provider.loaded
        if loaded is None or loaded.tier is None or not self.is_healthy or not provider.is_loaded(args.model):
            return None
        if _tokens_looked_at(args.logits) > 1 and not self._is_batchable(args):
            return None  # how much must be left to evaluate is known when it is served

        def plan() -> Ahead | None:
            if provider.loaded is not loaded:
                return None
            try:
                args.tokenised = self._found_parts(provider.tokenizer, request, args)
            except Exception:  # noqa: BLE001 - told when the request is served
                return None
            return self.prompt_cache.plan(args.tokenised[0], getattr(args, "rewarm", Asked()))

        try:
            planned: Ahead | None = self._order(plan)
        except EngineError:
            return None  # busy: it will wait in the queue all the same
        if planned is not None:
            planned.read()
            log.info("rewarm: read %d tokens ahead of the queue in %.3f s", planned.match.n_tokens, planned.took_s)
        return planned

    # The generation thread.

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
                for answers in list(self._open):
                    answers.put(error)
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
        self.prompt_cache.planned = getattr(args, "planned", None)
        try:
            found = getattr(args, "tokenised", None) or self._found_parts(tokenizer, request, args)
        except Exception as error:
            log.warning("rewarm: a request could not be tokenised", exc_info=True)
            raise BadRequest(f"The prompt cannot be made from this request ({type(error).__name__}).") from error
        if not len(found[0]):
            raise BadRequest("The prompt has no tokens.", "prompt")
        asked = args.rewarm
        self.prompt_cache.asked = asked
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

    def _found_parts(self, tokenizer: Any, request: Any, args: Any) -> Any:
        return self._in_parts(super()._tokenize(tokenizer, request, args), tokenizer, request, args)

    def _in_parts(self, found: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        """What the engine found of a prompt, with the parts that it does not look for after a tool's result."""
        prompt, segments, kinds, initial_state, vision = found
        is_chat = request.request_type == "chat" and tokenizer.has_chat_template and vision is None
        if not is_chat or len(segments) > 1 or request.messages[-1]["role"] == "user":
            return found
        arguments = {**self.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        segments, kinds = points.parts(tokenizer, request, arguments, prompt)
        return prompt, segments, kinds, initial_state, vision

    def _next_request(self, timeout: float | None = None) -> Any:
        self.prompt_cache.let_go()
        self._carry_out_orders()
        found = super()._next_request(timeout)
        if found is None:
            self._idle(is_idle=timeout is not None)
            return None
        self._idle_since = None
        answers, request, args = found
        asked = args.rewarm = getattr(args, "rewarm", Asked())
        args.model = Shared(args.model.model, args.model.draft, args.model.adapter, asked.tenant, asked.mode)
        watched = _ContextQueue(answers, self.prompt_cache, self._open.discard)
        self._open.add(watched)
        return watched, request, args

    def _idle(self, *, is_idle: bool) -> None:
        """Nothing is asked: after a while, make the saves that were put off."""
        now = time.monotonic()
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= _IDLE_S and self.prompt_cache.n_waiting:
            self.prompt_cache.save_what_waits()

    def _serve_single(self, request: Any, *stream: Any) -> None:
        _, _, args = request
        self.prompt_cache.keep_rest = _tokens_looked_at(args.logits)
        self.prompt_cache.expect_fetch()
        self.prompt_cache.is_alone = self.model_provider.draft_model is None
        try:
            super()._serve_single(request, *stream)
        finally:
            self.prompt_cache.keep_rest = 1
            self.prompt_cache.is_alone = False
            self.prompt_cache.live = None
            if (planned := getattr(args, "planned", None)) is not None:
                planned.release()


class _ContextQueue:
    """A request's queue that shows its context to the cache on its way to the handler, and its end to `end`."""

    def __init__(self, answers: Any, cache: StoredPromptCache, end: Callable[[_ContextQueue], None]) -> None:
        self._answers = answers
        self._cache = cache
        self._end = end
        self._context: Any = None
        self._began = 0.0

    def put(self, item: Any) -> None:
        if isinstance(item, engine.GenerationContext):
            self._cache.begin(item)
            self._context, self._began = item, time.perf_counter()
        elif isinstance(item, engine.Response) and self._began:
            n_evaluated = len(self._context.prompt) - max(0, self._context.prompt_cache_count)
            self._cache.prefilled(n_evaluated, time.perf_counter() - self._began)
            self._began = 0.0
        elif isinstance(item, tuple):
            self._cache.evaluated(*item)
        if item is None or isinstance(item, Exception):
            self._end(self)
        self._answers.put(item)


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
