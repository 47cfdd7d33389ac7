"""Small parts beneath the pages on what is kept: the remembered place, the titles of conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the gateway's packages")

from rewarm.cache.prefix_cache import default_root
from rewarm.gateway.place import Place
from rewarm.gateway.settings import Settings
from rewarm.gateway.titles import Titles


def test_the_chosen_place_is_remembered_for_the_next_start(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    assert Place(settings).forced_by == ""
    for name in ("new", "newer"):
        Place(settings).remember(tmp_path / name)
        assert Settings().cache_dir == default_root() == tmp_path / name
        assert Place(Settings()).forced_by == ""


def test_what_is_said_at_the_start_stands_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Place(Settings()).remember(tmp_path / "chosen")
    given = Settings(cache_dir=tmp_path / "given")
    assert given.cache_dir == tmp_path / "given"
    assert "--dir" in Place(given).forced_by
    Place(given).remember(tmp_path / "elsewhere")
    assert default_root() == tmp_path / "chosen"  # one beside the usual cache: that stays the usual
    monkeypatch.setenv("REWARM_DIR", str(tmp_path / "environment"))
    settings = Settings()
    assert settings.cache_dir == tmp_path / "environment"
    assert "REWARM_DIR" in Place(settings).forced_by


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
