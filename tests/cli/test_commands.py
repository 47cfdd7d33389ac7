"""The commands that look at a cache, pin and forget: what they say, and what they refuse."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import rewarm
from rewarm.cli import consent
from rewarm.cli.app import app
from rewarm.errors import EngineError, RootError
from rewarm.testing.driver import on_disk
from rewarm.testing.fake_engine import FakeEngine, pair

TOKENS = list(range(100, 122))
ODD = "[red]\x1b[31m na\u00efve \U0001f600"


def run(*arguments: str | Path, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Entries `talk` and `other` with a common first half, and one whose label would steer a terminal."""
    engine = FakeEngine(1, (pair(),))
    with rewarm.open(tmp_path / "kv", block_tokens=4) as cache:
        space = cache.namespace(rewarm.Identity({"weights": "a"}, name="model-a"))
        for label, tokens in (("talk", TOKENS), ("other", [*TOKENS[:12], 7, 8, 9]), (ODD, TOKENS[::-1])):
            space.save(tokens, engine.state(tokens), label=label)
        assert cache.flush(30)
    return tmp_path / "kv"


def entries(root: Path) -> dict[str, dict]:
    return {row["label"]: row for row in json.loads(run("ls", "--dir", root, "--json").stdout)}


def bytes_under(root: Path) -> dict[str, bytes]:
    """All files but the index, which notes who has it open."""
    return {
        str(path): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith("index.db") and path.suffix != ".lock"
    }


READING = [["ls"], ["show", "talk"], ["stats"], ["models"], ["config"], ["doctor", "--no-speed"], ["verify"]]
NAMING = [["show", "x"], ["pin", "x"], ["unpin", "x"], ["forget", "x", "--yes"]]


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_what_reads_changes_nothing_and_has_a_json_form(root: Path, command: Sequence[str]) -> None:
    before = bytes_under(root)
    plain, said = run(*command, "--dir", root), run(*command, "--dir", root, "--json")
    assert (plain.exit_code, said.exit_code) == (0, 0), plain.output
    assert plain.stdout.strip()
    assert isinstance(json.loads(said.stdout), dict | list)
    assert bytes_under(root) == before


@pytest.mark.parametrize("command", [*READING, *NAMING], ids=" ".join)
def test_a_look_at_no_cache_makes_none(tmp_path: Path, command: Sequence[str]) -> None:
    for name in ("gone", "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        done = run(*command, "--dir", tmp_path / name)
        named = command in NAMING or command[0] == "show"
        assert done.exit_code == (2 if named else 0), done.output
        assert "cache" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("command", [["stats"], ["ls"], ["verify"]], ids=" ".join)
def test_an_empty_cache_is_shown_as_such(tmp_path: Path, command: Sequence[str]) -> None:
    rewarm.open(tmp_path / "kv").close()
    assert run(*command, "--dir", tmp_path / "kv").exit_code == 0
    assert run(*command, "--dir", tmp_path / "kv", "--json").exit_code == 0


@pytest.mark.parametrize("harm", ["gone", "newer", "broken"])
@pytest.mark.parametrize(
    "command",
    [["ls"], ["stats"], ["models"], ["verify"], ["clear", "--yes"], ["pin", "talk"], ["forget", "talk", "--yes"]],
)
def test_a_broken_root_is_said_and_left_alone(root: Path, command: Sequence[str], harm: str) -> None:
    path = root / "store.json"
    said = json.loads(path.read_text())
    if harm == "gone":
        path.unlink()
    else:
        path.write_text("{" if harm == "broken" else json.dumps({**said, "format": 999}))
    before = bytes_under(root)
    done = run(*command, "--dir", root)
    assert isinstance(done.exception, RootError)
    assert "store.json" in str(done.exception)
    assert bytes_under(root) == before


def test_doctor_says_what_is_wrong_with_a_broken_root(root: Path) -> None:
    (root / "store.json").write_text("{")
    done = run("doctor", "--no-speed", "--dir", root)
    assert done.exit_code == 1
    assert "FAULT" in done.stdout and "store.json" in done.stdout


def test_repair_makes_lost_settings_with_the_block_size_of_the_records(root: Path) -> None:
    (root / "store.json").unlink()
    said = json.loads(run("repair", "--dir", root, "--json").stdout)
    assert said["made_settings"]
    assert json.loads((root / "store.json").read_text())["block_tokens"] == 4
    assert set(entries(root)) == {"talk", "other", ODD}


def test_show_tells_an_entrys_records(root: Path) -> None:
    said = json.loads(run("show", "talk", "--dir", root, "--json").stdout)
    assert [each["n_tokens"] for each in said["records"] if each["kind"] == "block"] == [4, 8, 12, 16, 20]
    assert said["records"][-1]["n_tokens"] == 22
    assert sum(each["nbytes"] for each in said["records"]) == said["nbytes"]
    assert "5 blocks, 1 points" in run("show", said["id"][:6], "--dir", root).stdout


def test_no_label_steers_the_terminal(root: Path) -> None:
    for command in (["ls"], ["show", ODD], ["pin", ODD]):
        done = run(*command, "--dir", root)
        assert done.exit_code == 0
        assert "\x1b" not in done.stdout
        assert "[red]" in done.stdout


def test_pins_are_set_by_label_and_by_id(root: Path) -> None:
    ids = {label: row["id"] for label, row in entries(root).items()}
    said = json.loads(run("pin", "talk", ids["other"][:6], "--dir", root, "--json").stdout)
    assert said == {"pinned": True, "entries": [ids["talk"], ids["other"]]}
    assert [row["pinned"] for row in entries(root).values()].count(True) == 2
    assert run("unpin", "talk", "--dir", root).exit_code == 0
    assert not entries(root)["talk"]["pinned"]


@pytest.mark.parametrize("command", [["pin"], ["unpin"], ["forget", "--yes"], ["show"]], ids=" ".join)
@pytest.mark.parametrize("name", ["", "abc", "no such", "zzzz", "\udc80"])
def test_an_unknown_entry_changes_nothing(root: Path, command: Sequence[str], name: str) -> None:
    before = bytes_under(root)
    names = [name] if command == ["show"] else ["talk", name]
    done = run(*command, *names, "--dir", root)
    assert done.exit_code == 2, done.output
    assert bytes_under(root) == before


def test_a_name_of_several_entries_erases_nothing(tmp_path: Path) -> None:
    engine = FakeEngine(1, (pair(),))
    with rewarm.open(tmp_path, block_tokens=4) as cache:
        for weights in "ab":
            space = cache.namespace(rewarm.Identity({"weights": weights}))
            space.save(TOKENS, engine.state(TOKENS), label="same")
        assert cache.flush(30)
    done = run("forget", "same", "--yes", "--dir", tmp_path)
    assert done.exit_code == 2
    assert "several" in done.stderr
    assert len(json.loads(run("ls", "--dir", tmp_path, "--json").stdout)) == 2


def test_forget_erases_what_only_the_entries_need(root: Path) -> None:
    before = bytes_under(root)
    dry = json.loads(run("forget", "talk", "--dry-run", "--dir", root, "--json").stdout)
    assert bytes_under(root) == before
    real = json.loads(run("forget", "talk", "--yes", "--dir", root, "--json").stdout)
    assert (dry["n_files"], dry["nbytes"]) == (real["n_files"], real["nbytes"])
    assert set(entries(root)) == {"other", ODD}
    assert run("forget", "other", ODD, "--yes", "--dir", root).exit_code == 0
    assert on_disk(root).records == ()


def test_a_dry_run_over_several_entries_names_the_exact_union(root: Path) -> None:
    before = bytes_under(root)
    alone = [json.loads(run("forget", name, "--dry-run", "--dir", root, "--json").stdout) for name in ("talk", "other")]
    dry = json.loads(run("forget", "talk", "other", "talk", "--dry-run", "--dir", root, "--json").stdout)
    assert dry["n_files"] > sum(each["n_files"] for each in alone)  # what only both need goes with both
    said = run("forget", "talk", "other", "--dry-run", "--dir", root).stdout
    assert f"Would erase {dry['n_files']} files" in said
    assert bytes_under(root) == before
    real = json.loads(run("forget", "talk", "other", "--yes", "--dir", root, "--json").stdout)
    assert (dry["n_files"], dry["nbytes"]) == (real["n_files"], real["nbytes"])
    assert len(before) - len(bytes_under(root)) == dry["n_files"]


def test_models_names_the_bundled_file_its_bytes_and_what_is_kept_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("rewarm.gateway.models", reason="needs the gateway's packages")
    file = tmp_path / "Tiny-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF" + bytes(996))
    monkeypatch.setattr(models.gguf, "path", lambda: file)
    monkeypatch.setattr(models.gguf, "has_engine", lambda: True)
    monkeypatch.setenv("REWARM_ENGINE", "llama")
    monkeypatch.setenv("REWARM_DISCOVER", "")
    engine = FakeEngine(1, (pair(),))
    with rewarm.open(tmp_path / "kv", block_tokens=4) as cache:
        identity = rewarm.Identity.from_model(file, engine="llama.cpp")  # named as a worker names it
        space = cache.namespace(identity)
        assert identity.wait(30)
        space.save(TOKENS, engine.state(TOKENS))
        assert cache.flush(30)
    told = json.loads(run("models", "--dir", tmp_path / "kv", "--json").stdout)
    (model,) = told["models"]
    assert (model["source"], model["path"], model["nbytes"]) == ("bundled", str(file), 1000)
    assert [kept["fingerprint"] for kept in model["kept"]] == [identity.fingerprint]
    assert told["others"] == []
    assert "1000 B" in run("models", "--dir", tmp_path / "kv").stdout


@pytest.mark.parametrize("lacking", ["weights", "engine"])
def test_models_says_why_the_bundled_one_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    models = pytest.importorskip("rewarm.gateway.models", reason="needs the gateway's packages")

    def gone() -> Path:
        raise EngineError("The bundled model is not installed.")

    monkeypatch.setattr(models.gguf, "path", gone if lacking == "weights" else lambda: Path("m.gguf"))
    monkeypatch.setattr(models.gguf, "has_engine", lambda: lacking != "engine")
    monkeypatch.setenv("REWARM_ENGINE", "llama")
    monkeypatch.setenv("REWARM_DISCOVER", "")
    (model,) = json.loads(run("models", "--json").stdout)["models"]
    assert "not installed" in model["why_not"]
    with pytest.raises(EngineError, match="not installed"):
        models.find_models(models.Settings())[0].prepare(lambda _part, _what: None)


def test_forget_asks_and_does_nothing_unasked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("forget", "talk", "--dir", root).exit_code == 2
    monkeypatch.setattr(consent, "is_somebody_there", lambda: True)
    assert run("forget", "talk", "--dir", root, answer="n\n").exit_code == 1
    assert len(entries(root)) == 3
    assert run("forget", "talk", "--dir", root, answer="y\n").exit_code == 0
    assert len(entries(root)) == 2


@pytest.mark.parametrize(
    "text", ["[9223372036854775808]", "[99999999999999999999999]", "[-9223372036854775809]", "[1.5]"]
)
def test_explain_refuses_what_is_no_token_id(root: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    done = run("explain", tmp_path / "p.json", "--dir", root)
    assert done.exit_code == 2, done.exception
    (tmp_path / "p.json").write_bytes(bytes(range(256)))
    assert run("explain", tmp_path / "p.json", "--dir", root).exit_code == 2


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes as on POSIX")
def test_doctor_names_a_folder_that_others_can_look_into(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    said = json.loads(run("doctor", "--no-speed", "--dir", tmp_path / "open", "--json").stdout)
    assert ("permissions", "warning") in [(each["about"], each["state"]) for each in said["findings"]]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_doctor_names_a_place_where_no_folder_can_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    done = run("doctor", "--no-speed", "--dir", tmp_path / name)
    assert done.exit_code == 1
    assert "cannot be written" in done.stdout
