"""Small models on disk, and what the tests of identities share. Their weights are any bytes: nobody computes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rewarm.cache.digest_memo import Memo
from rewarm.cache.identity import Identity

SETTINGS: dict[str, Any] = {
    "engine": "fake",
    "engine_epoch": "fake 1.0",
    "codec": 1,
    "kv_dtype": "bfloat16",
    "kv_bits": 8,
    "kv_group_size": 64,
    "kv_start": 5000,
    "window": {"size": 4096, "sinks": 4},
}
CONFIG: dict[str, Any] = {
    "_name_or_path": "someone/something",
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "sliding_window": 512,
    "quantization": {"bits": 4, "group_size": 64},
    "text_config": {"rope_theta": 1000000, "use_cache": True},
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_json(path: Path, value: Any, **style: Any) -> None:
    path.write_text(json.dumps(value, **style), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), **changes})


def safetensors(name: str, seed: int, n: int = 4096) -> bytes:
    """A safetensors file of one tensor of `n` bytes."""
    header = json.dumps({name: {"dtype": "U8", "shape": [n], "data_offsets": [0, n]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes((seed + i * 7) % 251 for i in range(n))


def write_model(folder: Path, seed: int = 0) -> Path:
    """A model folder with two shards and all that usually lies beside them."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", CONFIG)
    for i, name in enumerate(SHARDS):
        (folder / name).write_bytes(safetensors(f"layer.{i}.weight", seed + i))
    weight_map = {f"layer.{i}.weight": name for i, name in enumerate(SHARDS)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(folder / "preprocessor_config.json", {"size": 224})
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"a": 0}}})
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    write_json(folder / "generation_config.json", {"temperature": 0.7, "top_k": 20})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("# A model")
    return folder


def write_adapter(folder: Path, seed: int = 50) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "adapter_config.json", {"rank": 8, "scale": 20.0})
    (folder / "adapters.safetensors").write_bytes(safetensors("lora_a", seed, 512))
    return folder


def write_gguf(folder: Path, n_shards: int = 3, name: str = "big") -> Path:
    """A GGUF model; the path of its first shard."""
    folder.mkdir(parents=True, exist_ok=True)
    if n_shards == 1:
        (folder / f"{name}.gguf").write_bytes(b"GGUF" + bytes(2000))
        return folder / f"{name}.gguf"
    for i in range(1, n_shards + 1):
        (folder / f"{name}-{i:05}-of-{n_shards:05}.gguf").write_bytes(b"GGUF" + bytes((i,)) * 2000)
    return folder / f"{name}-00001-of-{n_shards:05}.gguf"


def warm_memo(path: Path) -> Memo:
    """A memo that believes even files of this moment: its clock is ahead."""
    return Memo(path, clock=lambda: time.time() + 60)


def identify(path: Path, memo: Memo | None = None, **settings: Any) -> Identity:
    """The settled identity of the model at `path`."""
    identity = Identity.from_model(path, memo=memo, **{**SETTINGS, **settings})
    identity.wait(30)
    assert identity.error is not None or identity.fingerprint is not None, "hashing has not ended"
    return identity


def fingerprint(path: Path, memo: Memo | None = None, **settings: Any) -> str:
    """The fingerprint of the model at `path`, which must have one."""
    identity = identify(path, memo, **settings)
    assert identity.error is None
    assert identity.fingerprint is not None
    return identity.fingerprint


def overwrite(path: Path, data: bytes, *, put_back_times: bool = False) -> None:
    """New content in the same file; afterwards, perhaps, the times that anyone can set are the old ones."""
    before = path.stat()
    wait_for_the_clock_of(path)
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()
    if put_back_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def wait_for_the_clock_of(path: Path) -> None:
    """Until a change of `path` would bear another time than its last one; file systems' clocks tick slowly."""
    probe = path.with_name(".clock")
    for _ in range(1000):
        probe.write_bytes(b"")
        later = probe.stat().st_ctime_ns > path.stat().st_ctime_ns
        probe.unlink()
        if later:
            return
        time.sleep(0.005)
    raise AssertionError("the file system's clock stands still")


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]
