"""`rewarm serve`: what its options ask of the gateway. The gateway itself is tested in `tests/gateway`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rewarm.cli import extras
from rewarm.cli.app import app


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, Any]]:
    """What the gateway was asked for, one item per call."""
    calls: list[Mapping[str, Any]] = []
    monkeypatch.setattr(extras, "serve_gateway", calls.append)
    return calls


def test_every_option_reaches_the_gateway(asked: list[Mapping[str, Any]]) -> None:
    line = "serve --host ::1 --port 0 --dir kv --model a --model b/c --max-bytes 1.5GiB --max-files 7"
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.stderr
    assert asked == [
        {
            "host": "::1",
            "port": 0,
            "cache_dir": Path("kv"),
            "models": [Path("a"), Path("b/c")],
            "max_bytes": 3 * 2**29,
            "max_files": 7,
        }
    ]


def test_the_gateways_own_defaults_hold_for_what_is_not_named(asked: list[Mapping[str, Any]]) -> None:
    assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert asked == [{}]


@pytest.mark.parametrize("wrong", ["--max-bytes 3x", "--max-files 0", "--port 70000", "--port x"])
def test_a_wrong_value_opens_nothing(asked: list[Mapping[str, Any]], wrong: str) -> None:
    done = CliRunner().invoke(app, ["serve", *wrong.split()])
    assert done.exit_code == 2
    assert wrong.split()[0] in done.stderr
    assert asked == []


def test_the_settings_of_the_gateway_take_these_names(tmp_path: Path) -> None:
    settings = pytest.importorskip("rewarm.gateway.settings", reason="needs the gateway's packages").Settings
    given = {"host": "127.0.0.1", "port": 0, "cache_dir": tmp_path, "models": [tmp_path / "a"], "max_bytes": 1}
    made = settings(**given, max_files=2)
    for name, value in given.items():
        assert getattr(made, name) == value
