"""What gives another identity, and what keeps it: one row each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from identity_models import (
    CONFIG,
    SETTINGS,
    SHARDS,
    edit_json,
    fingerprint,
    flipped,
    identify,
    overwrite,
    safetensors,
    wait_for_the_clock_of,
    warm_memo,
    write_adapter,
    write_gguf,
    write_json,
    write_model,
)

from rewarm.cache.identity import Identity


@dataclass
class Case:
    """A model, its adapters and settings, which a row changes."""

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    def shard(self, i: int) -> Path:
        return self.path / SHARDS[i]

    def adapter(self, i: int) -> Path:
        return Path(self.settings["adapters"][i][0])


Change = Callable[[Case], object]


@pytest.fixture
def folder(tmp_path: Path) -> Case:
    adapters = [(write_adapter(tmp_path / "one", 50), 1.0), (write_adapter(tmp_path / "two", 60), 0.5)]
    return Case(write_model(tmp_path / "model"), {"adapters": adapters})


@pytest.fixture
def gguf(tmp_path: Path) -> Case:
    for name in ("lora.gguf", "control.gguf", "mmproj.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + name.encode() * 100)
    settings = {
        "adapters": [(tmp_path / "lora.gguf", 1.0)],
        "control": tmp_path / "control.gguf",
        "control_layers": [4, 20],
        "mmproj": tmp_path / "mmproj.gguf",
    }
    return Case(write_gguf(tmp_path / "gguf"), settings)


def configured(**changes: Any) -> Change:
    return lambda case: edit_json(case.config, **changes)


def setting(**changes: Any) -> Change:
    return lambda case: case.settings.update(changes)


def deep_byte(case: Case) -> None:
    data = case.shard(1).read_bytes()
    overwrite(case.shard(1), flipped(data, len(data) - 100))


def deep_byte_times_put_back(case: Case) -> None:
    data = case.shard(1).read_bytes()
    overwrite(case.shard(1), flipped(data, len(data) - 100), put_back_times=True)


def moved_over(case: Case) -> None:
    new = case.path / "new"
    new.write_bytes(flipped(case.shard(0).read_bytes(), 2000))
    new.replace(case.shard(0))


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def swap_shards(case: Case) -> None:
    """Each file says which tensors it holds; two that hold the same ones are told apart by their names only."""
    swap(case.shard(0), case.shard(1))


def requantise(case: Case) -> None:
    overwrite(case.shard(0), safetensors("layer.0.weight", 99))
    edit_json(case.config, quantization={"bits": 4, "group_size": 64, "mode": "mxfp4"})


def with_adapters(change: Callable[[list[tuple[Path, float]]], list[tuple[Path, float]]]) -> Change:
    return lambda case: case.settings.update(adapters=change(case.settings["adapters"]))


def rope_scaling(**changes: Any) -> Change:
    return configured(rope_scaling={**CONFIG["rope_scaling"], **changes})


FOLDER_CHANGES: dict[str, Change] = {
    "other weights of one shape (B015)": lambda case: overwrite(case.shard(0), safetensors("layer.0.weight", 9)),
    "re-quantised under one name (B017)": requantise,
    "one bit deep in one shard": deep_byte,
    "one bit deep in one shard, times put back (B017)": deep_byte_times_put_back,
    "a file moved over a shard": moved_over,
    "shards that change names": swap_shards,
    "a shard cut short": lambda case: overwrite(case.shard(1), case.shard(1).read_bytes()[:-1]),
    "a shard more": lambda case: (case.path / "model-00003-of-00003.safetensors").write_bytes(safetensors("b", 3)),
    "a shard less": lambda case: case.shard(1).unlink(),
    "another map of tensors to shards": lambda case: edit_json(
        case.path / "model.safetensors.index.json", weight_map={"layer.0.weight": SHARDS[1]}
    ),
    "RoPE base (B017)": configured(rope_theta=500000),
    "RoPE base of a part's own configuration": configured(text_config={"rope_theta": 5, "use_cache": True}),
    "RoPE scaling's kind": rope_scaling(type="linear"),
    "RoPE scaling's factor": rope_scaling(factor=8.0),
    "YaRN": rope_scaling(beta_fast=16),
    "no RoPE scaling": configured(rope_scaling=None),
    "window": configured(sliding_window=1024),
    "quantisation bits of the weights": configured(quantization={"bits": 8, "group_size": 64}),
    "quantisation groups of the weights": configured(quantization={"bits": 4, "group_size": 32}),
    "dtype of the weights": configured(torch_dtype="float16"),
    "a limit that is no longer infinite": configured(time_step_limit=[0.0, 1.0]),
    "a number instead of a boolean": configured(tie_word_embeddings=1),
    "a field that nobody knows": configured(brand_new_attention=True),
    "image processor (files)": lambda case: edit_json(case.path / "preprocessor_config.json", size=448),
    "quantisation in a file of its own": lambda case: write_json(case.path / "hf_quant_config.json", {"algo": "FP8"}),
    "source of the model's class": lambda case: (case.path / "modeling.py").write_text("class Model: pass"),
    "an adapter more": with_adapters(lambda adapters: [*adapters, (adapters[0][0], 1.0)]),
    "an adapter less (B023)": with_adapters(lambda adapters: adapters[1:]),
    "no adapters (B023)": with_adapters(lambda adapters: []),
    "adapter scale (B023)": with_adapters(lambda adapters: [(adapters[0][0], 0.75), adapters[1]]),
    "adapter order": with_adapters(lambda adapters: adapters[::-1]),
    "adapter scales the other way round": with_adapters(lambda two: [(two[0][0], two[1][1]), (two[1][0], two[0][1])]),
    "adapter weights under one path (B026)": lambda case: overwrite(
        case.adapter(1) / "adapters.safetensors", safetensors("lora_a", 77, 512), put_back_times=True
    ),
    "adapter configuration": lambda case: edit_json(case.adapter(0) / "adapter_config.json", scale=10.0),
    "KV bits (B018)": setting(kv_bits=4),
    "KV group size (B018)": setting(kv_group_size=32),
    "KV quantisation start": setting(kv_start=0),
    "KV dtype": setting(kv_dtype="float16"),
    "KV not quantised": setting(kv_bits=None),
    "sinks": setting(window={"size": 4096, "sinks": 0}),
    "codec version": setting(codec=2),
    "engine": setting(engine="other"),
    "engine version (B020)": setting(engine_epoch="fake 1.1"),
    "a setting more": setting(flash_attention=True),
}

GGUF_CHANGES: dict[str, Change] = {
    "one bit in the last shard": lambda case: overwrite(
        case.path.with_name("big-00003-of-00003.gguf"), flipped(b"GGUF" + bytes((3,)) * 2000, 1999), put_back_times=True
    ),
    "shards in another order": lambda case: swap(case.path, case.path.with_name("big-00002-of-00003.gguf")),
    "adapter under one path (B026)": lambda case: overwrite(case.adapter(0), b"GGUF" + b"lora.gguG" * 100),
    "adapter scale": with_adapters(lambda adapters: [(adapters[0][0], 0.9)]),
    "no adapter": setting(adapters=[]),
    "control vector under one path (B026)": lambda case: overwrite(case.settings["control"], b"GGUF" + bytes(1200)),
    "control vector's layers": setting(control_layers=[4, 21]),
    "image projector under one path (B026)": lambda case: overwrite(case.settings["mmproj"], b"GGUF"),
    "RoPE override": setting(rope_freq_base=1e6),
    "K type": setting(cache_type_k="q8_0"),
    "flash attention": setting(flash_attention=False),
    "engine build": setting(engine_epoch="b11549"),
}


def another(case: Case, change: Change, tmp_path: Path) -> None:
    """The change gives another fingerprint, whether the memo knows the files as they were or not."""
    memo = warm_memo(tmp_path / "memo.json")
    before = fingerprint(case.path, memo, **case.settings)
    assert fingerprint(case.path, memo, **case.settings) == before
    change(case)
    cold = fingerprint(case.path, warm_memo(tmp_path / "empty.json"), **case.settings)
    assert cold != before
    assert fingerprint(case.path, memo, **case.settings) == cold


@pytest.mark.parametrize("what", FOLDER_CHANGES)
def test_what_changes_the_kv_of_a_folder_gives_another_fingerprint(what: str, folder: Case, tmp_path: Path) -> None:
    another(folder, FOLDER_CHANGES[what], tmp_path)


@pytest.mark.parametrize("what", GGUF_CHANGES)
def test_what_changes_the_kv_of_a_gguf_gives_another_fingerprint(what: str, gguf: Case, tmp_path: Path) -> None:
    another(gguf, GGUF_CHANGES[what], tmp_path)


def moved(case: Case) -> None:
    case.path = case.path.rename(case.path.with_name("elsewhere"))


def copied(case: Case) -> None:
    case.path = Path(shutil.copytree(case.path, case.path.with_name("copy")))
    shutil.rmtree(case.path.with_name("model"))


def touched(case: Case) -> None:
    for path in case.path.iterdir():
        path.touch()


def rewritten(case: Case) -> None:
    for path in case.path.iterdir():
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)


def as_hub_snapshot(case: Case) -> None:
    """As the hub's client lays it out: names are links to blobs, which are named by what they should hold."""
    hub = case.path.with_name("models--org--name")
    snapshot = hub / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (hub / "blobs").mkdir()
    for i, path in enumerate(sorted(case.path.iterdir())):
        path.rename(hub / "blobs" / f"{i:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:064x}")
    case.path = snapshot


def through_a_link(case: Case) -> None:
    link = case.path.with_name("link")
    link.symlink_to(case.path, target_is_directory=True)
    case.path = link


def spaced_and_reordered(case: Case) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        found = json.loads((case.path / name).read_text())
        write_json(case.path / name, dict(reversed(found.items())), indent=4)


def adapters_moved(case: Case) -> None:
    adapters = case.settings["adapters"]
    case.settings["adapters"] = [(path.rename(path.with_name(f"{path.name}-moved")), scale) for path, scale in adapters]


def write(name: str, data: str) -> Change:
    def change(case: Case) -> None:
        (case.path / name).parent.mkdir(exist_ok=True)
        (case.path / name).write_text(data)

    return change


FOLDER_KEEPS: dict[str, Change] = {
    "moved": moved,
    "copied": copied,
    "touched": touched,
    "rewritten with the same bytes": rewritten,
    "as a hub snapshot of links": as_hub_snapshot,
    "through a link": through_a_link,
    "by a relative path": lambda case: setattr(case, "path", Path(os.path.relpath(case.path))),
    "permissions": lambda case: case.shard(0).chmod(0o444),
    "configuration spaced and ordered otherwise": spaced_and_reordered,
    "10000 for 10000.0": configured(rope_theta=10000),
    "8.0 for 8": setting(kv_bits=8.0),
    "settings in another order": lambda case: case.settings.update(reversed(SETTINGS.items())),
    "tokenizer": write("tokenizer.json", "{}"),
    "chat template": write("chat_template.jinja", "{{ other }}"),
    "chat template in the tokenizer's configuration": write("tokenizer_config.json", '{"chat_template": ""}'),
    "sampler": write("generation_config.json", '{"temperature": 0}'),
    "README": write("README.md", "Other words"),
    "what file managers leave": write("._model-00001-of-00002.safetensors", "Mac OS X"),
    "a folder beside": write("original/consolidated.safetensors", "x"),
    "where the configuration came from": configured(_name_or_path="else", _commit_hash="0123"),
    "who wrote the configuration": configured(transformers_version="5.0.0"),
    "whether transformers keeps a cache": configured(use_cache=False, text_config={"rope_theta": 1000000}),
    "display name": setting(name="Anna"),
    "adapters moved": adapters_moved,
    "adapter scale 1 for 1.0": with_adapters(lambda two: [(two[0][0], 1), two[1]]),
}


def renamed_shards(case: Case) -> None:
    for i in range(1, 4):
        case.path.with_name(f"big-{i:05}-of-00003.gguf").rename(case.path.with_name(f"huge-{i:05}-of-00003.gguf"))
    case.path = case.path.with_name("huge-00001-of-00003.gguf")


def folder_moved(case: Case) -> None:
    case.path = case.path.parent.rename(case.path.parent.with_name("elsewhere")) / case.path.name


GGUF_KEEPS: dict[str, Change] = {
    "renamed": renamed_shards,
    "moved": folder_moved,
    "by another of its shards": lambda case: setattr(case, "path", case.path.with_name("big-00002-of-00003.gguf")),
    "another model beside": lambda case: write_gguf(case.path.parent, 3, "small"),
    "control vector moved": lambda case: case.settings.update(
        control=case.settings["control"].rename(case.path.with_name("moved.gguf"))
    ),
}


def same(case: Case, change: Change, tmp_path: Path) -> None:
    memo = warm_memo(tmp_path / "memo.json")
    before = fingerprint(case.path, memo, **case.settings)
    change(case)
    assert fingerprint(case.path, memo, **case.settings) == before
    assert fingerprint(case.path, warm_memo(tmp_path / "empty.json"), **case.settings) == before


@pytest.mark.parametrize("what", FOLDER_KEEPS)
def test_what_leaves_the_kv_of_a_folder_alone_keeps_the_fingerprint(what: str, folder: Case, tmp_path: Path) -> None:
    same(folder, FOLDER_KEEPS[what], tmp_path)


@pytest.mark.parametrize("what", GGUF_KEEPS)
def test_what_leaves_the_kv_of_a_gguf_alone_keeps_the_fingerprint(what: str, gguf: Case, tmp_path: Path) -> None:
    same(gguf, GGUF_KEEPS[what], tmp_path)


def test_the_tables_are_as_long_as_promised() -> None:
    assert len(FOLDER_CHANGES) >= 25
    assert len(FOLDER_KEEPS) >= 12


def test_b017_same_size_and_times_put_back_is_seen_by_a_warm_memo(tmp_path: Path) -> None:
    """Size, mtime, inode and path are as they were: the change time, which nobody can set, is not."""
    model, memo = write_model(tmp_path / "model"), warm_memo(tmp_path / "memo.json")
    before = fingerprint(model, memo)
    weights = model / SHARDS[0]
    stat = weights.stat()
    overwrite(weights, flipped(weights.read_bytes(), 3000), put_back_times=True)
    now = weights.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    assert fingerprint(model, memo) != before


def test_b020_revisions_of_one_repository_are_told_apart_by_content(tmp_path: Path) -> None:
    """Neither the repository's name nor the revision's counts: the same weights under two revisions are one model."""
    snapshots = tmp_path / "models--org--name" / "snapshots"
    one, other = write_model(snapshots / "aaaa", 0), write_model(snapshots / "bbbb", 1)
    same_again = write_model(snapshots / "cccc", 0)
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(same_again)
    assert {identify(path).name for path in (one, other)} == {"org/name"}


def test_b023_every_set_of_adapters_is_a_model_of_its_own(tmp_path: Path) -> None:
    model, one, two = write_model(tmp_path / "m"), write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    a, b = (one, 1), (two, 1)
    sets = [[], [a], [b], [(one, 0.5)], [a, b], [b, a]]
    assert len({fingerprint(model, adapters=adapters) for adapters in sets}) == len(sets)


def test_b018_the_changed_field_is_named(tmp_path: Path) -> None:
    from rewarm.state.identity import differing

    model = write_model(tmp_path / "model")
    before = identify(model)
    edit_json(model / "config.json", rope_theta=1)
    after = identify(model, kv_bits=4)
    assert differing(before.fields, after.fields) == ["config.rope_theta", "kv_bits"]


def test_a_links_target_counts_not_its_name(tmp_path: Path) -> None:
    """A blob's name is what its content should hash to; the content is what counts."""
    case = Case(write_model(tmp_path / "model"))
    as_hub_snapshot(case)
    before = fingerprint(case.path)
    blob = (case.path / SHARDS[0]).resolve()
    overwrite(blob, flipped(blob.read_bytes(), 3000), put_back_times=True)
    assert fingerprint(case.path) != before


def test_the_class_that_a_configuration_names_counts_wherever_it_is(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    source = model / "code" / "own.py"
    source.parent.mkdir()
    source.write_text("class Model: ...")
    edit_json(model / "config.json", model_file="code/own.py")
    before = fingerprint(model)
    wait_for_the_clock_of(source)
    source.write_text("class Model: pass")
    assert fingerprint(model) != before
    source.unlink()
    assert "own.py" in (identify(model).error or "")


def test_parameters_of_a_live_model() -> None:
    import numpy as np

    weight = np.arange(6, dtype=np.float32)

    def of(*parameters: tuple[str, str, tuple[int, ...], Any], **settings: Any) -> str | None:
        return Identity.from_parameters(parameters, **settings).fingerprint

    first, second = ("a", "float32", (2, 3), weight.reshape(2, 3)), ("b", "float32", (6,), weight)
    same = of(first, second, engine="x")
    assert same == of(second, first, engine="x") == of(("a", "float32", (2, 3), weight.tobytes()), second, engine="x")
    others = [
        of(first, engine="x"),
        of(first, second, engine="y"),
        of(first, ("c", *second[1:]), engine="x"),
        of(first, ("b", "bfloat16", *second[2:]), engine="x"),
        of(first, ("b", "float32", (3, 2), weight), engine="x"),
        of(first, ("b", "float32", (6,), weight + 1), engine="x"),
        of(first, ("b", "float32", (6,), -weight), engine="x"),
        of(first, second, ("empty", "float32", (0,), b""), engine="x"),
    ]
    assert len({same, *others}) == len(others) + 1
    with pytest.raises(ValueError, match="two parameters"):
        of(first, first)
    with pytest.raises(ValueError, match="C order"):
        of(("a", "float32", (3, 2), weight.reshape(2, 3).T))
