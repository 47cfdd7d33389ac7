"""llama-server's own command line: what of it changes the KV, what defeats the cache, what is ours to set.

Pure: takes arguments and environment, starts nothing. A flag that is not known here goes to the engine as it
is and counts as part of the identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ALIASES = {
    "-m": "--model",
    "-mm": "--mmproj",
    "-c": "--ctx-size",
    "-n": "--predict",
    "--n-predict": "--predict",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-np": "--parallel",
    "--n-parallel": "--parallel",
    "-ngl": "--n-gpu-layers",
    "--gpu-layers": "--n-gpu-layers",
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-kvu": "--kv-unified",
    "-no-kvu": "--no-kv-unified",
    "-a": "--alias",
    "-cram": "--cache-ram",
    "-ctxcp": "--ctx-checkpoints",
    "--swa-checkpoints": "--ctx-checkpoints",
    "-cpent": "--checkpoint-min-step",
    "-md": "--model-draft",
    "--spec-draft-model": "--model-draft",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "-mu": "--model-url",
    "-lv": "--verbosity",
    "--log-verbosity": "--verbosity",
    "-v": "--verbose",
    "-h": "--help",
    "--usage": "--help",
    "-s": "--seed",
    "--temperature": "--temp",
    "-to": "--timeout",
    "-sps": "--slot-prompt-similarity",
    "-cb": "--cont-batching",
    "-nocb": "--no-cont-batching",
    "-dev": "--device",
    "-sm": "--split-mode",
    "-ts": "--tensor-split",
    "-mg": "--main-gpu",
    "-ot": "--override-tensor",
    "--embeddings": "--embedding",
    "--reranking": "--rerank",
    "-cmoe": "--cpu-moe",
    "-ncmoe": "--n-cpu-moe",
    "-gan": "--grp-attn-n",
    "-gaw": "--grp-attn-w",
}
"""Short and old names, by the names used here."""

OURS = frozenset(
    {"--host", "--port", "--api-key", "--api-key-file", "--slot-save-path", "--ssl-key-file", "--ssl-cert-file"}
)
"""Flags that never reach the engine: its address and its keys are the proxy's."""

IRRELEVANT = frozenset(
    {
        *OURS,
        *("--model", "--mmproj", "--lora", "--lora-scaled", "--control-vector", "--control-vector-scaled"),
        *("--ctx-size", "--batch-size", "--ubatch-size", "--threads", "--threads-batch", "--parallel", "--keep"),
        *("--predict", "--flash-attn", "--kv-unified", "--no-kv-unified", "--kv-unified-per-slot"),
        *("--cache-ram", "--ctx-checkpoints", "--checkpoint-min-step", "--cache-idle-slots", "--no-cache-idle-slots"),
        *("--cache-reuse", "--cache-prompt", "--no-cache-prompt", "--context-shift", "--no-context-shift"),
        *("--alias", "--tags", "--chat-template", "--chat-template-file", "--chat-template-kwargs", "--jinja"),
        *("--no-jinja", "--reasoning", "--reasoning-format", "--reasoning-budget", "--reasoning-budget-message"),
        *("--prefill-assistant", "--no-prefill-assistant", "--skip-chat-parsing", "--special"),
        *("--warmup", "--no-warmup", "--mlock", "--mmap", "--no-mmap", "--perf", "--no-perf", "--cont-batching"),
        *("--no-cont-batching", "--metrics", "--props", "--slots", "--no-slots", "--timeout", "--threads-http"),
        *("--ui", "--no-ui", "--webui", "--no-webui", "--path", "--api-prefix", "--verbosity", "--verbose"),
        *("--log-file", "--log-disable", "--log-colors", "--log-prefix", "--log-timestamps", "--offline"),
        *("--slot-prompt-similarity", "--sse-ping-interval", "--cors-origins", "--cors-methods", "--cors-headers"),
        *("--seed", "--samplers", "--sampler-seq", "--ignore-eos", "--temp", "--top-k", "--top-p", "--min-p"),
        *("--xtc-probability", "--xtc-threshold", "--typical", "--repeat-last-n", "--repeat-penalty"),
        *("--presence-penalty", "--frequency-penalty", "--dry-multiplier", "--dry-base", "--dry-allowed-length"),
        *("--dry-penalty-last-n", "--dry-sequence-breaker", "--dynatemp-range", "--dynatemp-exp", "--mirostat"),
        *("--mirostat-lr", "--mirostat-ent", "--logit-bias", "--grammar", "--grammar-file", "--json-schema"),
        *("--json-schema-file", "--prio", "--prio-batch", "--poll", "--poll-batch", "--cpu-mask", "--cpu-range"),
        *("--cpu-strict", "--cpu-mask-batch", "--cpu-range-batch", "--cpu-strict-batch", "--hf-repo", "--hf-file"),
        *("--hf-token", "--model-url", "--no-mmproj", "--mmproj-auto", "--no-mmproj-auto"),
    }
)
"""Flags that are proved to leave the KV alone, and those that count by another way (files by content)."""

_ENVIRONMENT = {
    "LLAMA_ARG_N_PARALLEL": "--parallel",
    "LLAMA_ARG_N_PREDICT": "--predict",
    "LLAMA_ARG_BATCH": "--batch-size",
    "LLAMA_ARG_UBATCH": "--ubatch-size",
    "LLAMA_ARG_ENDPOINT_METRICS": "--metrics",
    "LLAMA_ARG_ENDPOINT_PROPS": "--props",
    "LLAMA_ARG_ENDPOINT_SLOTS": "--slots",
    "LLAMA_ARG_HF_REPO": "--hf-repo",
    "LLAMA_API_KEY": "--api-key",
}
"""Variables whose flags have other names."""

_FALSE = ("0", "off", "false", "disabled", "no")
_NUMBER = re.compile(r"-\.?\d")


class UnusableFlags(ValueError):
    """Flags that cannot be honoured: says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as it was given.

    Attributes:
        name: its long name.
        values: what follows it.
    """

    name: str
    values: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """The first value, or ""."""
        return self.values[0] if self.values else ""


@dataclass(frozen=True, slots=True)
class Flags:
    """llama-server's flags, in order.

    Attributes:
        given: on the command line.
        ambient: out of the environment, which the command line overrides.
    """

    given: tuple[Flag, ...]
    ambient: tuple[Flag, ...] = ()

    def last(self, name: str) -> Flag | None:
        """The one that counts of all flags called `name`."""
        return next((flag for flag in (*reversed(self.given), *self.ambient) if flag.name == name), None)

    def value(self, name: str, default: str = "") -> str:
        """Its value, or `default`."""
        flag = self.last(name)
        return flag.value if flag else default

    def number(self, name: str, default: int) -> int:
        """Its value as a whole number.

        Raises:
            UnusableFlags: it is none.
        """
        flag = self.last(name)
        try:
            return default if flag is None else int(flag.value)
        except ValueError:
            raise UnusableFlags(f"{name} needs a whole number, not {flag.value if flag else ''!r}") from None

    def switched(self, name: str) -> bool | None:
        """Whether `--name` or `--no-name` came last; None where neither is given."""
        for flag in (*reversed(self.given), *self.ambient):
            if flag.name == f"--{name}":
                return flag.value.lower() not in _FALSE
            if flag.name == f"--no-{name}":
                return False
        return None

    def all(self, name: str) -> list[Flag]:
        """Every one called `name`: repeatable flags."""
        return [flag for flag in (*self.ambient, *self.given) if flag.name == name]

    @property
    def api_keys(self) -> frozenset[str]:
        """The keys of which clients must bear one; empty when none is asked for.

        Raises:
            UnusableFlags: a file of keys cannot be read.
        """
        keys = [key for flag in self.all("--api-key") for key in flag.value.split(",")]
        for flag in self.all("--api-key-file"):
            try:
                keys += Path(flag.value).read_text(encoding="utf-8").splitlines()
            except OSError as error:
                raise UnusableFlags(f"--api-key-file: {error}") from None
        return frozenset(key for key in keys if key)

    def passed_on(self) -> list[str]:
        """The command line for the engine, without what is the proxy's."""
        return [word for flag in self.given if flag.name not in OURS for word in (flag.name, *flag.values)]

    def relevant(self) -> list[list[str]]:
        """Name and values of each flag that may change the KV, the last of each name, by name."""
        found = {flag.name: list(flag.values) for flag in (*self.ambient, *self.given) if flag.name not in IRRELEVANT}
        repeated = {name: [v for flag in self.all(name) for v in flag.values] for name in found}
        return [[name, *repeated[name]] for name in sorted(found)]


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Flags:
    """The flags of a command line, and those that an own binary reads out of `environment`.

    Raises:
        UnusableFlags: something that is no flag and no flag's value.
    """
    given: list[Flag] = []
    for word in arguments:
        if word.startswith("-") and _NUMBER.match(word) is None:
            given.append(Flag(ALIASES.get(word, word)))
        elif given:
            given[-1] = Flag(given[-1].name, (*given[-1].values, word))
        else:
            raise UnusableFlags(f"{word!r} is no flag of llama-server")
    return Flags(tuple(given), tuple(_ambient(environment or {})))


def _ambient(environment: Mapping[str, str]) -> Iterator[Flag]:
    for key, value in sorted(environment.items()):
        if key in _ENVIRONMENT:
            yield Flag(_ENVIRONMENT[key], (value,))
        elif key.startswith("LLAMA_ARG_"):
            yield Flag("--" + key.removeprefix("LLAMA_ARG_").lower().replace("_", "-"), (value,))


def adapters(flag: Flag, *, scaled: bool) -> list[tuple[Path, float]]:
    """Files and scales of `--lora` and `--control-vector` (comma-separated), and of their scaled forms.

    Raises:
        ValueError: a scale is no number.
    """
    if scaled and len(flag.values) == 2 and ":" not in flag.values[0]:
        return [(Path(flag.values[0]), float(flag.values[1]))]
    found = []
    for item in (item for value in flag.values for item in value.split(",") if item):
        path, _, scale = item.rpartition(":") if scaled else (item, "", "1")
        found.append((Path(path), float(scale)))
    return found


_DRAFTING = re.compile(r"--(spec|draft|model-draft|hf-repo-draft|dflash|eagle3|nextn|lookup)\b|-hfd|-hfrd|-ngld")


def what_defeats(flags: Flags) -> str:
    """Why requests are served uncached with these flags, as a sentence for the user; "" when they are not."""
    for flag in (*flags.ambient, *flags.given):
        if _DRAFTING.match(flag.name) and flag.value.lower() not in _FALSE:
            return f"{flag.name}: with a draft model, requests are served uncached."
    reasons = {
        "--context-shift": flags.switched("context-shift") is True,
        "--swa-full": flags.switched("swa-full") is True,
        "--embedding": flags.switched("embedding") is True,
        "--rerank": flags.switched("rerank") is True,
        "--no-cache-prompt": flags.switched("cache-prompt") is False,
        f"--cache-reuse {flags.value('--cache-reuse')}": flags.number("--cache-reuse", 0) > 0,
        "--slot-save-path": bool(flags.value("--slot-save-path")),
        "--grp-attn-n": flags.number("--grp-attn-n", 1) != 1,
        "--sleep-idle-seconds": flags.number("--sleep-idle-seconds", -1) > 0,
    }
    told = {
        "--context-shift": "it moves the cache under tokens that it was not computed for",
        "--swa-full": "a restored slot that is rewound gives wrong text with it",
        "--embedding": "embeddings leave nothing to reuse",
        "--rerank": "ranking leaves nothing to reuse",
        "--no-cache-prompt": "it asks the server to forget every prompt",
        "--slot-save-path": "slots are then saved and restored by you",
        "--grp-attn-n": "it moves positions",
        "--sleep-idle-seconds": "the server then drops its slots on its own",
    }
    for name, found in reasons.items():
        if found:
            why = told.get(name, "it moves the cache under tokens that it was not computed for")
            return f"{name}: {why}; requests are served uncached."
    if flags.last("--model") is None:
        return "No --model names a GGUF file that could be identified; requests are served uncached."
    return ""


def warnings(flags: Flags) -> list[str]:
    """What the user should know of flags that are honoured and cost something."""
    told = []
    if flags.number("--cache-ram", 0) != 0:
        told.append("--cache-ram: prompts are kept in the server's memory twice; rewarm starts it with 0 by default")
    if (n := flags.number("--ctx-checkpoints", 4)) > 8:
        told.append(f"--ctx-checkpoints {n}: every save of a slot writes them all; rewarm uses 4 by default")
    return told


WANTED = (
    ("--no-context-shift", "--context-shift", ()),
    ("--cache-reuse", "--cache-reuse", ("0",)),
    ("--cache-ram", "--cache-ram", ("0",)),
    ("--no-cache-idle-slots", "--cache-idle-slots", ()),
    ("--ctx-checkpoints", "--ctx-checkpoints", ("4",)),
)
"""What the engine is started with: the flag, the one of the user's that takes its place, and the value."""


def added(flags: Flags, known: frozenset[str]) -> list[str]:
    """The flags that the cache needs, of those that the build knows, where the user has not set them."""
    words: list[str] = []
    for name, instead, values in WANTED:
        if name in known and flags.last(name) is None and flags.last(instead) is None:
            words += [name, *values]
    return words
