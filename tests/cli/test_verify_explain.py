"""`rewarm verify`, `repair` and `explain`, on a small root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rewarm
from rewarm.cli.app import app
from rewarm.testing.driver import on_disk
from rewarm.testing.fake_engine import FakeEngine, pair

TOKENS = list(range(100, 122))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    engine = FakeEngine(1, (pair(),))
    with rewarm.open(tmp_path / "kv", block_tokens=4) as cache:
        namespace = cache.namespace(rewarm.Identity({"weights": "a"}, name="model-a"))
        namespace.save(TOKENS, engine.state(TOKENS))
        assert cache.flush(30)
    return tmp_path / "kv"


def damage(root: Path) -> Path:
    path = on_disk(root).records[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path


def test_verify_of_a_whole_cache(root: Path) -> None:
    done = run("verify", "--dir", root)
    assert done.exit_code == 0
    assert "6 good records" in done.stdout
    said = json.loads(run("verify", "--dir", root, "--json").stdout)
    assert said["clean"]
    assert said["nbytes_indexed"] == said["nbytes_allocated"] > 0


def test_verify_names_what_is_damaged_and_moves_it_when_told(root: Path) -> None:
    bad = damage(root)
    done = run("verify", "--dir", root)
    assert done.exit_code == 1
    assert f"damaged: {bad.name}" in done.stdout
    assert bad.exists()
    said = json.loads(run("verify", "--dir", root, "--quarantine", "--json").stdout)
    assert [each["file"] for each in said["damaged"]] == [bad.name]
    assert not bad.exists()
    assert next(path.name for path in (root / "quarantine").iterdir()).endswith(bad.name)
    assert run("verify", "--dir", root).exit_code == 0


def test_repair_makes_index_and_disk_agree(root: Path) -> None:
    with rewarm.open(root) as cache:
        cache.store._root.index.execute("DELETE FROM records WHERE n = 8")
    done = run("verify", "--dir", root)
    assert (done.exit_code, "not in the index" in done.stdout, "rewarm repair" in done.stdout) == (1, True, True)
    assert json.loads(run("repair", "--dir", root, "--json").stdout) == {"n_records": 6, "made_settings": False}
    assert run("verify", "--dir", root).exit_code == 0


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_no_cache_is_no_fault(tmp_path: Path, command: str) -> None:
    done = run(command, "--dir", tmp_path / "nothing")
    assert done.exit_code == 0
    assert "There is no cache" in done.stdout
    assert not (tmp_path / "nothing").exists()


def prompt(tmp_path: Path, tokens: list[int]) -> Path:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(tokens))
    return path


def test_explain_names_the_place(root: Path, tmp_path: Path) -> None:
    done = run("explain", prompt(tmp_path, [*TOKENS[:9], 7, 8, 9]), "--dir", root)
    assert done.exit_code == 0
    assert "9 of 12 tokens would be restored." in done.stdout
    assert "At token 9, after '100 101 102 103 104 105 106 107 108'" in done.stdout
    assert "goes on with '7', and what is stored with '109'" in done.stdout
    said = json.loads(run("explain", prompt(tmp_path, [*TOKENS, 1]), "--dir", root, "--json").stdout)
    assert (said["prompt_tokens"], said["restorable_tokens"], said["reason"]) == (23, 22, "hit")


def test_explain_counts_as_no_use(root: Path, tmp_path: Path) -> None:
    run("explain", prompt(tmp_path, [1, 2, 3]), "--dir", root)
    with rewarm.open(root) as cache:
        assert cache.stats()["misses"] == {}


def test_explain_shows_text_where_a_tokenizer_is_given(root: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(200)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "prompt.txt"
    text.write_text(" ".join(f"w{token}" for token in [*TOKENS[:3], 7, 8]))
    done = run("explain", text, "--dir", root, "--tokenizer", tmp_path)
    assert "after 'w100 w101 w102', the prompt goes on with 'w7', and what is stored with 'w103'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--model", "zz"], "begins with 'zz'"), (["--dir", "nowhere"], "There is no cache")],
    ids=["model", "folder"],
)
def test_explain_says_what_it_lacks(root: Path, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run("explain", prompt(tmp_path, TOKENS), "--dir", root, *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    text = tmp_path / "text"
    text.write_text("Hello")
    assert "no JSON list" in run("explain", text, "--dir", root).stderr
