"""Small parts beneath the pages on what is kept: the remembered place, the titles of conversations."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the gateway's packages")

from rewarm.gateway.place import Place, with_chosen_place
from rewarm.gateway.settings import Settings
from rewarm.gateway.titles import Titles


def test_the_chosen_place_is_remembered_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    usual = settings.cache_dir
    assert with_chosen_place(settings).cache_dir == usual
    Place(settings).remember(tmp_path / "new")
    assert with_chosen_place(settings).cache_dir == tmp_path / "new"
    assert stat.S_IMODE((tmp_path / "data" / "gateway.json").stat().st_mode) == 0o600
    Place(settings).remember(tmp_path / "newer")
    assert with_chosen_place(settings).cache_dir == tmp_path / "newer"
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["gateway.json"]


def test_what_is_said_at_the_start_stands_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Place(Settings(data_dir=tmp_path)).remember(tmp_path / "chosen")
    given = Settings(data_dir=tmp_path, cache_dir=tmp_path / "given")
    assert with_chosen_place(given).cache_dir == tmp_path / "given"
    assert "--dir" in Place(given).forced_by
    monkeypatch.setenv("REWARM_DIR", str(tmp_path / "environment"))
    settings = Settings(data_dir=tmp_path)
    assert with_chosen_place(settings).cache_dir == tmp_path / "environment"
    assert "REWARM_DIR" in Place(settings).forced_by


@pytest.mark.parametrize("content", ["", "{", '{"cache_dir": 7}', "[]", "\xff"])
def test_a_broken_memory_of_it_is_no_fault(tmp_path: Path, content: str) -> None:
    (tmp_path / "gateway.json").write_bytes(content.encode("latin-1"))
    settings = Settings(data_dir=tmp_path)
    assert with_chosen_place(settings).cache_dir == settings.cache_dir


def test_titles_follow_the_files(tmp_path: Path) -> None:
    titles = Titles(tmp_path / "chats")
    assert titles() == {}
    (tmp_path / "chats").mkdir()

    def write(number: int, words: str) -> Path:
        name = f"{number:032x}"
        path = tmp_path / "chats" / f"{name}.json"
        path.write_text(json.dumps({"id": name, "updated_s": 1, "messages": [{"role": "user", "content": words}]}))
        return path

    first = write(1, "Why is the sky blue?")
    assert titles() == {f"{1:032x}": "Why is the sky blue?"}
    same = titles()
    assert titles() is same
    write(2, "Regex for dates")
    (tmp_path / "chats" / f"{3:032x}.json").write_text("broken")
    assert set(titles()) == {f"{1:032x}", f"{2:032x}"}
    first.unlink()
    assert set(titles()) == {f"{2:032x}"}
