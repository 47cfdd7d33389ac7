"""llama-server's flags as the engine inside the wheel understands them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rewarm.adapters.llama import flags
from rewarm.adapters.llama.flags import UnusableFlags

pytest.importorskip("xllamacpp")

from rewarm.adapters.llama import engine_params


def params(*words: str) -> object:
    return engine_params.params(flags.parse(words))


def test_flags_become_parameters() -> None:
    made = params(
        *("-m", "a.gguf", "-c", "4096", "-np", "2", "-t", "3", "-ngl", "7", "-fa", "off", "-ctk", "q8_0"),
        *("--rope-scaling", "yarn", "--rope-scale", "4", "--temp", "0.25", "--no-warmup", "--no-repack", "-a", "x,y"),
        *("--lora-scaled", "l.gguf:0.5", "--chat-template-kwargs", '{"a": true}', "--reasoning-format", "none"),
    )
    assert (made.model.path, made.n_ctx, made.n_parallel, made.cpuparams.n_threads) == ("a.gguf", 4096, 2, 3)
    assert made.n_gpu_layers == 7
    assert made.flash_attn_type.name.endswith("DISABLED")
    assert made.cache_type_k.name == "GGML_TYPE_Q8_0"
    assert made.rope_scaling_type.name.endswith("YARN")
    assert made.rope_freq_scale == pytest.approx(0.25)
    assert made.sampling.temp == pytest.approx(0.25)
    assert made.warmup is False
    assert made.no_extra_bufts is True
    assert made.model_alias == {"x", "y"}
    assert [(lora.path, lora.scale) for lora in made.lora_adapters] == [("l.gguf", 0.5)]
    assert made.default_template_kwargs == {"a": "true"}


def test_slots_are_llama_servers_default() -> None:
    assert params("-m", "x").n_parallel == -1


@pytest.mark.parametrize(
    "words",
    [["--no-such-flag"], ["-c", "many"], ["-ctk", "q9_9"], ["-fa", "perhaps"], ["-c"], ["--rope-scaling", "x"]],
    ids=" ".join,
)
def test_what_is_not_known_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(UnusableFlags, match=flags.ALIASES.get(words[0], words[0])):
        params(*words)


def test_the_program_tells_its_flags_and_its_version() -> None:
    command = [sys.executable, "-m", "rewarm.adapters.llama.engine_process"]
    said = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60).stdout
    for name, _, _ in flags.WANTED:
        assert name in said.split()
    assert "--slot-save-path" in said.split()
    assert subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60).stdout.startswith(
        "version: xllamacpp "
    )
    done = subprocess.run([*command, "--no-such-flag"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "--llama-server PATH" in done.stderr) == (2, True)
