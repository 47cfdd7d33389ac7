"""`rewarm ls` and `rewarm clear`, on a small root of two models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rewarm
from rewarm.cli import consent
from rewarm.cli.app import app
from rewarm.errors import RootError
from rewarm.testing.fake_engine import FakeEngine, pair

TOKENS = list(range(100, 122))


def run(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two entries of model `a` (one labelled and pinned), one of model `b`."""
    engine = FakeEngine(1, (pair(),))
    with rewarm.open(tmp_path / "kv", block_tokens=4) as cache:
        a = cache.namespace(rewarm.Identity({"weights": "a"}, name="model-a"))
        b = cache.namespace(rewarm.Identity({"weights": "b"}, name="model-b"))
        a.save(TOKENS, engine.state(TOKENS), label="my talk")
        a.save(TOKENS[::-1], engine.state(TOKENS[::-1]))
        b.save(TOKENS, engine.state(TOKENS))
        assert cache.flush(30)
        labelled = next(entry for entry in cache.entries() if entry.label)
        assert cache.pin(labelled)
    return tmp_path / "kv"


def fingerprints(root: Path) -> dict[str, str]:
    rows = json.loads(run("ls", "--dir", root, "--json").stdout)
    return {row["model"]: row["fingerprint"] for row in rows}


def n_entries(root: Path) -> int:
    return len(json.loads(run("ls", "--dir", root, "--json").stdout))


def test_ls_shows_every_entry(root: Path) -> None:
    done = run("ls", "--dir", root)
    assert done.exit_code == 0
    for word in ("my talk", "(assistant)", "22", "model-a", "model-b", "pinned", " ago", "3 entries"):
        assert word in done.stdout, word
    for fingerprint in fingerprints(root).values():
        assert fingerprint[:12] in done.stdout


def test_ls_json_is_a_list_of_entries(root: Path) -> None:
    rows = json.loads(run("ls", "--dir", root, "--json").stdout)
    assert len(rows) == 3
    labelled = next(row for row in rows if row["label"] == "my talk")
    assert (labelled["model"], labelled["n_tokens"], labelled["pinned"]) == ("model-a", 22, True)
    assert labelled["boundary"] == "assistant"
    assert labelled["nbytes"] > 0


def test_ls_uses_the_folder_of_the_environment(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARM_DIR", str(root))
    assert len(json.loads(run("ls", "--json").stdout)) == 3


@pytest.mark.parametrize("command", [["ls"], ["clear", "--yes"]], ids=" ".join)
def test_no_cache_is_made_where_there_is_none(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    for folder in (tmp_path / "documents", tmp_path / "gone"):
        done = run(*command, "--dir", folder)
        assert done.exit_code == 0
        assert "There is no cache in" in done.stdout
    assert list((tmp_path / "documents").iterdir()) == []
    assert not (tmp_path / "gone").exists()


def test_a_root_that_cannot_be_used_is_an_error_of_its_own(root: Path) -> None:
    (root / "store.json").write_text("{")
    done = run("ls", "--dir", root)
    assert isinstance(done.exception, RootError)


def test_clear_of_one_model_leaves_the_other(root: Path) -> None:
    known = fingerprints(root)
    done = run("clear", "--dir", root, "--model", known["model-a"][:8], "--yes", "--json")
    told = json.loads(done.stdout)
    assert (told["dry_run"], told["fingerprint"]) == (False, known["model-a"])
    assert told["n_files"] > 0
    assert set(fingerprints(root)) == {"model-b"}
    assert not list((root / known["model-a"]).rglob("*.block"))
    assert list((root / known["model-b"]).rglob("*.block"))


def test_clear_of_all_erases_every_record(root: Path) -> None:
    done = run("clear", "--dir", root, "--yes")
    assert done.exit_code == 0
    assert "Erased" in done.stdout
    assert n_entries(root) == 0
    assert not [path for kind in ("block", "point") for path in root.rglob(f"*.{kind}")]


def test_a_dry_run_tells_what_a_real_one_erases_and_erases_nothing(root: Path) -> None:
    before = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in (".block", ".point"))
    dry = json.loads(run("clear", "--dir", root, "--dry-run", "--json").stdout)
    assert before == sorted(p for p in root.rglob("*") if p.suffix in (".block", ".point"))
    real = json.loads(run("clear", "--dir", root, "--yes", "--json").stdout)
    assert (dry["n_files"], dry["nbytes"]) == (real["n_files"], real["nbytes"])
    assert dry["n_files"] == len(before)


def test_it_erases_nothing_where_nobody_can_be_asked(root: Path) -> None:
    done = run("clear", "--dir", root)
    assert done.exit_code == 2
    assert "--yes" in done.stderr
    assert n_entries(root) == 3


@pytest.mark.parametrize(("answer", "left"), [("n\n", 3), ("\n", 3), ("y\n", 0)], ids=["no", "nothing", "yes"])
def test_it_asks_on_a_terminal(root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: int) -> None:
    monkeypatch.setattr(consent, "is_somebody_there", lambda: True)
    done = run("clear", "--dir", root, answer=answer)
    assert "Erase" in done.stderr
    assert "all models" in done.stderr
    assert (done.exit_code == 0) == (left == 0)
    assert n_entries(root) == left


@pytest.mark.parametrize(("prefix", "words"), [("", "No model"), ("zz", "No model")])
def test_a_fingerprint_that_is_not_there_erases_nothing(root: Path, prefix: str, words: str) -> None:
    done = run("clear", "--dir", root, "--model", prefix, "--yes")
    assert done.exit_code == 2
    assert words in done.stderr
    assert n_entries(root) == 3


def test_a_prefix_of_several_fingerprints_erases_nothing(tmp_path: Path) -> None:
    """Seventeen models: two fingerprints begin with one hex character at least."""
    engine, tokens = FakeEngine(1, (pair(),)), TOKENS[:5]
    with rewarm.open(tmp_path, block_tokens=4) as cache:
        for i in range(17):
            cache.namespace(rewarm.Identity({"weights": i})).save(tokens, engine.state(tokens))
        assert cache.flush(30)
        found = [entry.fingerprint for entry in cache.entries()]
    shared = next(c for c in "0123456789abcdef" if sum(each.startswith(c) for each in found) > 1)
    done = run("clear", "--dir", tmp_path, "--model", shared, "--yes")
    assert done.exit_code == 2
    assert "several" in done.stderr
    assert n_entries(tmp_path) == 17
