"""Reading straight into MLX's own memory: whose memory it is, and how much of it a restore needs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from matrix import TOKENS, Shelf, runner, shelves

import rewarm
from rewarm.adapters.mlx import codec
from rewarm.adapters.mlx.codecs import tensors
from rewarm.cache import namespace
from rewarm.state.sequence import Rows, SequenceState
from rewarm.testing.conformance import difference


def test_a_restore_reads_into_the_arrays_that_the_caches_use(tmp_path: Path) -> None:
    it = runner("gemma3_text", "bfloat16")
    live, _ = it.cold(TOKENS, [(0, 40)])
    with shelves(tmp_path / "kv") as cache:
        space = cache.namespace(rewarm.Identity({"test": "into"}))
        space.save(TOKENS[:40], it.encode(live, 40))
        assert cache.flush(60)
        match = space.find(TOKENS[:41])
        assert match.layout is not None
        buffers = codec.Buffers(match.layout, match.n_tokens)
        given: dict[str, Any] = {}

        def into(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
            given[name] = buffers.into(name, shape, dtype)
            return given[name]

        found: list[SequenceState] = []
        reader = threading.Thread(target=lambda: found.append(space.restore(match, into=into)))
        reader.start()
        reader.join()
        made = codec.decode(found[0], it.fresh(), buffers)
    assert not found[0].tensors, "the state is used up"
    assert sorted(given) == sorted(match.layout.by_name)
    for i, one in enumerate(made):
        for part in ("keys", "values"):
            mine = np.array(getattr(one, part).view(mx.uint16), copy=False)
            assert np.shares_memory(mine, given[f"layers.{i:03d}.{part}"])
    assert difference(it.encode(made, 40), it.encode(live, 40)) == ""


def test_a_restore_that_gets_less_than_its_buffers_were_made_for(tmp_path: Path) -> None:
    it = runner("llama")
    live, _ = it.cold(TOKENS, [(0, 40)])
    layout = it.encode(live, 40).layout()
    buffers = codec.Buffers(layout, 600)
    state = it.encode(live, 20)
    tensors = {}
    for spec in layout.tensors:
        array = buffers.into(spec.name, spec.shape_with(20), spec.storage)
        array[:, :, :20] = state.tensors[spec.name].array
        tensors[spec.name] = Rows(array, spec.axis)
    made = codec.decode(SequenceState(20, tensors), it.fresh(), buffers)
    assert [one.keys.shape[2] for one in made] == [256, 256]
    assert difference(it.encode(made, 20), state) == ""


def test_a_buffer_of_another_shape_is_not_used() -> None:
    it = runner("llama")
    buffers = codec.Buffers(it.encode(it.cold(TOKENS, [(0, 40)])[0], 40).layout(), 40)
    assert buffers.into("layers.000.keys", (1, 2, 300, 16), "<f4").shape == (1, 2, 300, 16)
    assert buffers.into("layers.000.keys", (1, 2, 30, 16), "<u2").dtype == np.uint16
    assert buffers.into("layers.099.keys", (1, 2), "<f4").shape == (1, 2)


def test_a_buffer_is_given_once() -> None:
    """A restore that begins again gets another one: a read that was given up may still end in the first."""
    it = runner("llama")
    buffers = codec.Buffers(it.encode(it.cold(TOKENS, [(0, 40)])[0], 40).layout(), 40)
    one, two = (buffers.into("layers.000.keys", (1, 2, 40, 16), "<f4") for _ in range(2))
    assert (one.shape, two.shape) == ((1, 2, 256, 16), (1, 2, 40, 16))
    assert not np.shares_memory(one, two)


def test_a_state_larger_than_the_free_memory_is_refused_before_it_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = runner("llama")
    with shelves(tmp_path / "kv") as cache:
        space = cache.namespace(rewarm.Identity({"test": "no room"}))
        space.save(TOKENS[:40], it.encode(it.cold(TOKENS, [(0, 40)])[0], 40))
        assert cache.flush(60)
        match = space.find(TOKENS[:41])
        assert match.layout is not None
        for free, n, reason in ((match.nbytes - 1, 0, "busy"), (match.nbytes, 40, "hit")):
            monkeypatch.setattr(tensors, "free_memory", lambda free=free: free)
            # Once the buffers are there, the store asks no more: what they take is no longer free.
            monkeypatch.setattr(namespace, "free_memory", lambda: 0)
            before = mx.get_active_memory()
            buffers = codec.Buffers(match.layout, match.n_tokens)
            assert (mx.get_active_memory() > before) is (n > 0)
            state = space.restore(match, into=buffers.into)
            assert (state.n_tokens, state.reason) == (n, reason)


def test_where_mlx_gives_copies_the_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "writable", lambda array: None)
    for name in ("gemma3_text", "qwen3_next", "quantised"):
        it = runner(name, "bfloat16")
        live, _ = it.cold(TOKENS, [(0, 20), (20, 21)])
        with shelves(tmp_path / name) as cache:
            shelf = Shelf(cache, name, it)
            shelf.save(TOKENS[:21], live)
            for straight in (True, False):
                _, made = shelf.restore(TOKENS[:22], straight=straight)
                assert difference(it.encode(made, 21), it.encode(live, 21)) == ""


MEMORY = """
import resource, sys
import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
import rewarm
from rewarm.adapters.mlx import codec

root, kind, what = sys.argv[1:]
LAYERS, N = 8, 8192
make = {"rows": KVCache, "window": lambda: RotatingKVCache(N), "opaque": lambda: ArraysCache(2)}[kind]
cache = rewarm.open(root, rewarm.Limits(min_free_bytes=0))
space = cache.namespace(rewarm.Identity({"test": kind}))
tokens = range(N)
if what == "save":
    live = [make() for _ in range(LAYERS)]
    for i, one in enumerate(live):
        rows = mx.random.normal((1, 8, N, 64), key=mx.random.key(i)).astype(mx.bfloat16)
        if kind == "opaque":
            one[0], one[1] = rows, rows
        else:
            one.update_and_fetch(rows, rows)
    space.save(tokens, codec.encode(live, N))
    assert cache.flush(120)
else:
    match = space.find([*tokens, 1])
    mx.eval(mx.zeros((1,)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffers = codec.Buffers(match.layout, match.n_tokens)
    made = codec.decode(space.restore(match, into=buffers.into), [make() for _ in range(LAYERS)], buffers)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    live = sum(one.nbytes for one in made)
    unit = 1 if sys.platform == "darwin" else 1024
    print(live, (after - before) * unit)
cache.close()
"""


@pytest.mark.parametrize("kind", ["rows", "window", "opaque"])
def test_b107_restoring_needs_little_more_than_the_live_cache(kind: str, tmp_path: Path) -> None:
    for what in ("save", "restore"):
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "kv"), kind, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    live, grown = map(int, done.stdout.split())
    assert live == 8 * 2 * 8 * 8192 * 64 * 2
    assert grown < live + 64 * 2**20, f"{grown - live} bytes beyond the live cache of {live}"
