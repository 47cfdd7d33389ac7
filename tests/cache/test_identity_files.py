"""Files that change, vanish or are none; waiting, progress and errors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identity_models import (
    SHARDS,
    edit_json,
    fingerprint,
    flipped,
    identify,
    overwrite,
    wait_for_the_clock_of,
    warm_memo,
    write_adapter,
    write_gguf,
    write_json,
    write_model,
)

from rewarm.cache import model_files
from rewarm.cache.digest_memo import Memo
from rewarm.cache.identity import Identity


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


class Hooked(Memo):
    """A memo that calls `before` when a digest is first asked for, and `after` when one is to be remembered."""

    def __init__(
        self, path: Path, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(path, clock=lambda: time.time() + 60)
        self._before, self._after = before, after

    def get(self, real: str, facts: tuple[int, int, int, int, int]) -> str | None:
        self._before()
        return super().get(real, facts)

    def put(self, real: str, facts: tuple[int, int, int, int, int], digest: str) -> None:
        super().put(real, facts, digest)
        self._after()


def once(change: Callable[[Path], object], path: Path) -> Callable[[], None]:
    left = [change]

    def run() -> None:
        if left:
            wait_for_the_clock_of(path)
            left.pop()(path)

    return run


def replaced(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(flipped(path.read_bytes(), 300))
    new.replace(path)


def in_place(path: Path) -> None:
    overwrite(path, flipped(path.read_bytes(), 300), put_back_times=True)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": replaced,
    "overwritten, times put back": in_place,
    "cut short": lambda path: os.truncate(path, 100),
    "emptied": lambda path: os.truncate(path, 0),
    "grown": lambda path: os.truncate(path, 10000),
    "touched": lambda path: path.touch(),
    "removed": lambda path: path.unlink(),
    "a pipe, which nobody writes to": pipe,
    "a file more": lambda path: path.with_name("model-3.safetensors").write_bytes(b"x"),
    "a configuration more": lambda path: write_json(path.with_name("quantize_config.json"), {"bits": 4}),
    "another configuration": lambda path: edit_json(path.with_name("config.json"), rope_theta=1),
    "another image processor": lambda path: edit_json(path.with_name("preprocessor_config.json"), size=1),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_files_that_change_while_they_are_loaded_give_no_identity(
    change: str, when: str, model: Path, tmp_path: Path
) -> None:
    """Before or after their content was read: nothing says which content the engine has got."""
    memo_path = tmp_path / "memo.json"
    identity = identify(model, Hooked(memo_path, **{when: once(CHANGES[change], model / SHARDS[1])}))
    assert identity.fingerprint is None
    assert identity.fingerprint_bytes is None
    assert dict(identity.fields) == {}
    gone = change in ("removed", "a pipe, which nobody writes to")
    assert ("model-00002" if gone else "changed") in (identity.error or "")
    if not gone:
        assert fingerprint(model, warm_memo(memo_path)) == fingerprint(model, warm_memo(tmp_path / "empty.json"))


@pytest.mark.parametrize("change", ["replaced", "overwritten, times put back", "cut short", "emptied", "grown"])
def test_a_file_that_changes_while_it_is_read_gives_no_identity(
    change: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "_CHUNK_NBYTES", 256)
    alter = once(CHANGES[change], model / SHARDS[0])
    real = model_files.blake3

    class Slow:
        def __init__(self, **options: Any) -> None:
            self._hasher = real(**options)

        def update(self, data: Any) -> None:
            self._hasher.update(data)
            alter()

        def hexdigest(self) -> str:
            return self._hasher.hexdigest()

    monkeypatch.setattr(model_files, "blake3", Slow)
    memo, weights = warm_memo(tmp_path / "memo.json"), model / SHARDS[0]
    stat = weights.stat()
    identity = identify(model, memo)
    assert identity.fingerprint is None
    assert f"{SHARDS[0]} changed" in (identity.error or "")
    # The old file, were it put back, is not remembered by what was read of the new one.
    facts = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)
    assert memo.get(os.path.realpath(weights), facts) is None


def test_an_adapter_that_changes_while_it_is_loaded_gives_no_identity(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    memo = Hooked(tmp_path / "memo.json", after=once(replaced, adapter / "adapters.safetensors"))
    identity = Identity.from_model(model, adapters=[(adapter, 1)], memo=memo)
    assert not identity.wait(30)
    assert "adapters.safetensors changed" in (identity.error or "")


def test_a_seam_can_ask_whether_the_files_are_still_the_same(model: Path, tmp_path: Path) -> None:
    identity = identify(model, warm_memo(tmp_path / "memo.json"))
    assert identity.files_unchanged()
    in_place(model / SHARDS[0])
    assert identity.fingerprint is not None
    assert not identity.files_unchanged()
    (model / SHARDS[0]).unlink()
    assert not identity.files_unchanged()
    assert Identity({}).files_unchanged()
    assert not identify(tmp_path / "none").files_unchanged()


def make_pipe(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    os.mkfifo(model / SHARDS[0])


def make_loop(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    (model / SHARDS[0]).symlink_to(SHARDS[0])


def make_folder(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    (model / SHARDS[0]).mkdir()


def break_link(model: Path) -> None:
    (model / SHARDS[0]).unlink()
    (model / SHARDS[0]).symlink_to("../../blobs/gone")


def no_weights(model: Path) -> None:
    for name in SHARDS:
        (model / name).unlink()


def config(text: str | bytes) -> Callable[[Path], object]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda model: (model / "config.json").write_bytes(data)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe for weights": (make_pipe, "is no file"),
    "a link to itself": (make_loop, SHARDS[0]),
    "a folder for weights": (make_folder, "is no file"),
    "a link to nothing": (break_link, SHARDS[0]),
    "no weights": (no_weights, "no .safetensors"),
    "no configuration": (lambda model: (model / "config.json").unlink(), "no config.json"),
    "a configuration that is no JSON": (config("{"), "config.json"),
    "a configuration that is a list": (config("[]"), "no JSON object"),
    "a configuration that is no text": (config(b"\xff\xfe{"), "config.json"),
    "a configuration nested without end": (config('{"a":' * 100000), "nested"),
    "a configuration nested deep": (config('{"a":' * 100 + "1" + "}" * 100), "nested"),
    "half a surrogate pair": (config('{"a": "\\ud800"}'), "surrogate"),
    "a huge number": (config('{"a": 1' + "0" * 10000 + "}"), "config.json"),
    "a huge configuration": (lambda model: os.truncate(model / "config.json", 2**30), "too large"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_model_has_an_error_and_no_identity(what: str, model: Path, tmp_path: Path) -> None:
    change, message = BAD[what]
    change(model)
    identity = identify(model, warm_memo(tmp_path / "memo.json"))
    assert identity.fingerprint is None
    assert message in (identity.error or "")


def test_what_is_not_there_has_an_error(tmp_path: Path) -> None:
    assert "none" in (identify(tmp_path / "none").error or "")
    shard = write_gguf(tmp_path)
    shard.with_name("big-00002-of-00003.gguf").unlink()
    assert "big-00002-of-00003.gguf" in (identify(shard).error or "")
    adapter = Identity.from_model(write_model(tmp_path / "model"), adapters=[(tmp_path / "no adapter", 1)])
    assert "no adapter" in (adapter.error or "")


def test_a_file_that_cannot_be_read_has_an_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may see the file but not read it; the tests may run as one who may read anything."""
    real = os.open

    def refuse(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(SHARDS[1]):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    identity = identify(model, warm_memo(tmp_path / "memo.json"))
    assert "Permission denied" in (identity.error or "")


def test_other_json_that_is_none_counts_by_its_bytes(model: Path) -> None:
    (model / "extra.json").write_text("{broken")
    before = fingerprint(model)
    (model / "extra.json").write_text("{broken!")
    assert fingerprint(model) != before


def test_wrong_calls_raise(model: Path) -> None:
    with pytest.raises(ValueError, match="weights"):
        Identity.from_model(model, weights="mine")
    with pytest.raises(ValueError, match="rope"):
        Identity.from_model(model, rope=float("nan"))
    with pytest.raises(ValueError, match="scales"):
        Identity.from_model(model, adapters=[(model, float("inf"))])
    with pytest.raises(ValueError, match="half"):
        Identity({"half": float("nan")})


# --- waiting ----------------------------------------------------------------------------------------------------


def test_it_returns_at_once_and_tells_who_waits(model: Path, tmp_path: Path) -> None:
    go, told = threading.Event(), threading.Event()
    identity = Identity.from_model(model, memo=Hooked(tmp_path / "memo.json", before=lambda: go.wait(30)))
    seen: list[Identity] = []
    identity.add_done_callback(seen.append)
    identity.add_done_callback(lambda _: told.set())
    total = sum((model / name).stat().st_size for name in SHARDS)
    assert identity.fingerprint is None
    assert identity.error is None
    assert identity.progress == (0, total)
    assert not identity.wait(0.01)
    assert "pending" in repr(identity)
    go.set()
    assert identity.wait(30)
    assert told.wait(30)
    assert seen == [identity]
    assert identity.progress == (total, total)
    assert len(identity.fingerprint or "") == 64
    assert bytes.fromhex(identity.fingerprint or "") == identity.fingerprint_bytes
    identity.add_done_callback(seen.append)
    assert seen == [identity, identity]


def test_an_error_ends_every_wait(model: Path, tmp_path: Path) -> None:
    go = threading.Event()

    def remove() -> None:
        go.wait(30)
        (model / SHARDS[1]).unlink(missing_ok=True)

    identity = Identity.from_model(model, memo=Hooked(tmp_path / "memo.json", after=remove))
    threading.Timer(0.05, go.set).start()
    assert not identity.wait(30)
    assert SHARDS[1] in (identity.error or "")


def test_whatever_happens_while_hashing_ends_the_wait(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(model_files, "_remembered", fail)
    identity = identify(model, warm_memo(tmp_path / "memo.json"))
    assert "MemoryError" in (identity.error or "")
    assert "MemoryError" in caplog.text


def test_a_callback_that_fails_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Identity) -> None:
        raise RuntimeError("mine")

    with caplog.at_level(logging.ERROR):
        Identity({}).add_done_callback(fail)
    assert "mine" in caplog.text


def test_fields_in_hand_are_known_at_once() -> None:
    fields = {"a": 1.0, "b": [1]}
    identity = Identity(fields, name="n")
    fields["b"].append(2)  # type: ignore[attr-defined]
    assert identity.wait(0)
    assert identity.fields == {"a": 1, "b": [1]}
    assert identity.fingerprint == Identity({"b": (1,), "a": 1}, name="m").fingerprint
    assert (identity.name, identity.error, identity.progress) == ("n", None, (0, 0))
    with pytest.raises(TypeError):
        identity.fields["a"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/Some-Model-4bit", "Some-Model-4bit"),
        ("hub/models--org--some-model/snapshots/0123", "org/some-model"),
        ("big.Q4_K_M.gguf", "big.Q4_K_M"),
        ("big-00001-of-00003.gguf", "big"),
        ("sha256-0123", "sha256-0123"),
    ],
)
def test_the_name_that_people_see(path: str, name: str, tmp_path: Path) -> None:
    assert identify(tmp_path / path).name == name
