"""The memo of digests: weights are hashed once, and nothing that it says is believed without proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identity_models import SHARDS, fingerprint, flipped, identify, safetensors, warm_memo, write_gguf, write_model

from rewarm.cache import model_files
from rewarm.cache.digest_memo import Memo
from rewarm.cache.identity import Identity


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def n_hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the weights that were truly read."""
    found: list[str] = []
    real = model_files.digest

    def digest(stamp: model_files.Stamp, progress: model_files.Progress | None = None) -> str:
        found.append(stamp.path.name)
        return real(stamp, progress)

    monkeypatch.setattr(model_files, "digest", digest)
    return found


def test_weights_are_hashed_once(model: Path, tmp_path: Path, n_hashed: list[str]) -> None:
    path = tmp_path / "cache" / "memo.json"
    first = fingerprint(model, warm_memo(path))
    assert n_hashed == list(SHARDS)
    again = identify(model, warm_memo(path))
    assert again.fingerprint == first
    assert again.progress[0] == again.progress[1] > 0
    assert n_hashed == list(SHARDS)
    (model / "new").write_bytes(flipped((model / SHARDS[1]).read_bytes(), 300))
    (model / "new").replace(model / SHARDS[1])
    assert fingerprint(model, warm_memo(path)) != first
    assert n_hashed == [*SHARDS, SHARDS[1]]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["memo.json"]


def test_the_memo_lies_in_the_users_cache_folder(home: Path) -> None:
    assert home in Memo().path.parents
    assert Memo().path.parent.name == "rewarm"


def test_a_file_of_this_moment_is_not_remembered(model: Path, tmp_path: Path) -> None:
    """It could change once more within one tick of the file system's clock, and nothing would show it."""
    fingerprint(model, Memo(tmp_path / "memo.json"))
    assert not (tmp_path / "memo.json").exists()


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def run(path: Path) -> None:
        contents = json.loads(path.read_text())
        change(contents)
        path.write_text(json.dumps(contents))

    return run


def other_digest(contents: dict[str, Any]) -> None:
    for entry in contents["files"].values():
        entry[-1] = "0" * 64


DAMAGE: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(bytes(range(256)) * 100),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "other JSON": lambda path: path.write_text("[1, 2]"),
    "nested without end": lambda path: path.write_text("[" * 1000000),
    "another version": damage(lambda contents: contents.update(version=2)),
    "a digest that is another one": damage(other_digest),
    "no digests": damage(lambda contents: contents.update(files=[])),
    "one entry of another kind": damage(lambda contents: contents["files"].update(x=1)),
    "open to others": lambda path: path.chmod(0o666),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_memo_is_ignored_and_written_anew(
    what: str, model: Path, tmp_path: Path, n_hashed: list[str]
) -> None:
    path = tmp_path / "memo.json"
    first = fingerprint(model, warm_memo(path))
    before = path.read_bytes()
    DAMAGE[what](path)
    n_hashed.clear()
    assert fingerprint(model, warm_memo(path)) == first
    assert n_hashed == list(SHARDS)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_memo_is_bounded(tmp_path: Path) -> None:
    memo = Memo(tmp_path / "memo.json", clock=time.time, max_entries=3)
    for i in range(5):
        memo.put(f"/model/{i}", (i, 0, 0, 0, 0), f"{i:064x}")
    memo.put("/model/3", (3, 0, 0, 0, 0), f"{3:064x}")
    known = [memo.get(f"/model/{i}", (i, 0, 0, 0, 0)) for i in range(5)]
    assert known == [None, None, f"{2:064x}", f"{3:064x}", f"{4:064x}"]


@pytest.mark.parametrize("other", range(5))
def test_every_fact_of_a_file_must_agree(other: int, tmp_path: Path) -> None:
    memo, facts = Memo(tmp_path / "memo.json"), (1, 2, 3, 4, 5)
    memo.put("/x", facts, "0" * 64)
    assert memo.get("/x", facts) == "0" * 64
    changed = tuple(value + (i == other) for i, value in enumerate(facts))
    assert memo.get("/x", changed) is None  # type: ignore[arg-type]
    assert memo.get("/y", facts) is None


def test_a_memo_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert fingerprint(model, warm_memo(tmp_path / "file" / "memo.json")) == fingerprint(model)


def test_names_that_are_no_text_can_be_remembered(model: Path, tmp_path: Path, n_hashed: list[str]) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel")
    try:
        model.rename(odd)
    except OSError:
        pytest.skip("this file system has text for names only")
    first = fingerprint(Path(odd), warm_memo(tmp_path / "memo.json"))
    n_hashed.clear()
    assert fingerprint(Path(odd), warm_memo(tmp_path / "memo.json")) == first
    assert n_hashed == []


PROCESS = """
import sys, time
from pathlib import Path
from rewarm.cache.digest_memo import Memo
from rewarm.cache.identity import Identity
memo = Memo(Path(sys.argv[1]), clock=lambda: time.time() + 60)
for path in sys.argv[2:]:
    identity = Identity.from_model(path, memo=memo)
    identity.wait(60)
    print(identity.fingerprint, identity.error)
"""


def test_several_processes_share_a_memo(tmp_path: Path) -> None:
    """What one of them loses of the memo is hashed again; what any of them reads is right."""
    models = [str(write_model(tmp_path / f"model-{i}", i)) for i in range(4)]
    memo = tmp_path / "memo.json"

    def start(paths: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", PROCESS, str(memo), *paths], stdout=subprocess.PIPE, text=True)

    processes = [start(models), start(models[::-1])]
    printed = [process.communicate(timeout=120)[0].split("\n") for process in processes]
    forward, backward = printed[0][:4], printed[1][:4][::-1]
    assert forward == backward
    assert len(set(forward)) == 4
    assert all(line.endswith(" None") for line in forward)
    for path, line in zip(models, forward, strict=True):
        identity = Identity.from_model(path, memo=warm_memo(memo))
        assert identity.wait(60)
        assert line.startswith(identity.fingerprint or "?")
    assert [entry.name for entry in tmp_path.iterdir() if "memo" in entry.name] == ["memo.json"]


def test_many_threads_share_a_memo(tmp_path: Path) -> None:
    models = [write_model(tmp_path / f"model-{i}", i) for i in range(6)]
    memo = warm_memo(tmp_path / "memo.json")
    identities = [Identity.from_model(path, memo=memo) for path in models]
    assert all(identity.wait(60) for identity in identities)
    assert len(json.loads(memo.path.read_text())["files"]) == 2 * len(models)


def test_an_empty_file_and_one_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blake3 import blake3

    monkeypatch.setattr(model_files, "_CHUNK_NBYTES", 1000)
    path = write_gguf(tmp_path, 1)
    for data in (b"", safetensors("x", 1, 5000)):
        path.write_bytes(data)
        assert identify(path).fields["weights"] == [blake3(data).hexdigest()]
