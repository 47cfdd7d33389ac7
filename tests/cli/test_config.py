"""`rewarm config` and the configuration file: which of four places a value comes from, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from typer.testing import CliRunner, Result

import rewarm
from rewarm.cache.config_file import config_path, read_config, write_value
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import default_root
from rewarm.cli.app import app
from rewarm.errors import ConfigurationError, GatewayError
from rewarm.gateway.settings import Settings, names_in_file
from rewarm.store.settings import Limits

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("REWARM_CONFIG", str(path))
    return path


def said(*arguments: str | Path) -> dict[str, Any]:
    done = run("config", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_file_is_in_the_users_configuration_folder(home: Path) -> None:
    assert config_path() == platformdirs.user_config_path("rewarm") / "config.toml"
    assert home in config_path().parents
    assert read_config() == {}


def test_flags_stand_above_the_environment_and_that_above_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said()["settings"]["port"] == {"value": 8420, "from": "default"}
    file.write_text("port = 81\n")
    assert said()["settings"]["port"] == {"value": 81, "from": str(file)}
    monkeypatch.setenv("REWARM_PORT", "82")
    assert said()["settings"]["port"] == {"value": 82, "from": "REWARM_PORT in the environment"}
    assert Settings(port=83).port == 83


def test_every_command_reads_the_folder_that_the_file_names(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('dir = "there"\n')
    assert default_root() == Settings().cache_dir == tmp_path / "there"
    rewarm.open().close()
    assert json.loads(run("stats", "--json").stdout)["folder"] == str(tmp_path / "there")
    monkeypatch.setenv("REWARM_DIR", str(tmp_path / "env"))
    assert default_root() == Settings().cache_dir == tmp_path / "env"
    assert said("--dir", tmp_path / "flag")["settings"]["dir"]["from"] == "--dir"


@pytest.mark.parametrize(
    ("text", "words"),
    [("port = [", "cannot be read"), ("prot = 1", "port perhaps"), ("max_bytes = 1", "rewarm config set max_bytes")],
)
def test_a_file_that_makes_no_sense_is_said(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        Settings()
    done = run("config")
    assert isinstance(done.exception, ConfigurationError)
    assert str(file) in str(done.exception)


@pytest.mark.parametrize("text", ['port = "x"', "worker_command = []", 'worker_command = [" "]', "host = 3"])
def test_a_wrong_value_is_told_with_its_place(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(GatewayError, match="config.toml"):
        Settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORKER_COMMAND", "[]"),
        ("WORKER_COMMAND", "x"),
        ("MAX_BYTES", "9" * 30),
        ("MAX_FILES", "-1"),
        ("PORT", "9" * 30),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"REWARM_{name}", value)
    with pytest.raises(GatewayError, match=f"REWARM_{name}"):
        Settings()


def test_binary_and_unreadable_files_are_one_error(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(bytes(range(256)))
    for path in (file, tmp_path, tmp_path / "gone.toml"):
        monkeypatch.setenv("REWARM_CONFIG", str(path))
        with pytest.raises(ConfigurationError, match=str(path)):
            read_config()


def test_the_folder_that_is_given_needs_no_file(file: Path, tmp_path: Path) -> None:
    file.write_text("[")
    assert run("ls", "--dir", tmp_path / "kv").exit_code == 0


def test_setting_a_line_keeps_the_others(file: Path) -> None:
    file.write_text('# mine\nport = 1 # one\nmodels = [\n  "a",\n]\n')
    assert run("config", "set", "port", "2").exit_code == 0
    assert file.read_text() == '# mine\nport = 2\nmodels = [\n  "a",\n]\n'
    before = file.read_text()
    done = run("config", "set", "models", "b")
    assert isinstance(done.exception, ConfigurationError)
    assert file.read_text() == before
    assert run("config", "set", "port", "none").exit_code == 0
    assert "port" not in tomllib.loads(file.read_text())


@pytest.mark.parametrize("value", ['a"b\\c', "line\nbreak", "\x7f\x01", "\U0001f600", "= # ["])
def test_any_text_is_written_so_that_it_is_read_again(file: Path, value: str) -> None:
    write_value("data_dir", value)
    assert read_config() == {"data_dir": value}


def test_a_new_file_is_for_its_owner_alone(home: Path) -> None:
    assert run("config", "set", "port", "99").exit_code == 0
    assert config_path().stat().st_mode & 0o077 == 0
    assert read_config() == {"port": 99}


@pytest.mark.parametrize("line", ["port 70000", "port x", "prot 1", "worker_command []", "engine gpu", "dir \0"])
def test_what_makes_no_sense_is_not_written(file: Path, line: str) -> None:
    done = run("config", "set", *line.split(" "))
    assert done.exit_code == 2, done.output
    assert file.read_text() == ""


def test_limits_and_rules_are_changed_in_the_folder(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    rewarm.open(root).close()
    for name, text, value in (
        ("max_bytes", "3GiB", 3 * 2**30),
        ("max_files", "77", 77),
        ("min_free_bytes", "1MB", 10**6),
        ("paused", "true", True),
        ("keep_days", "1.5", 1.5),
        ("write_bytes_per_day", "1GiB", 2**30),
        ("save_at", "idle", "idle"),
    ):
        done = run("config", "set", name, text, "--dir", root)
        assert done.exit_code == 0, done.output
        assert str(root) in done.stdout
        assert said("--dir", root)["stored"][name] == value
    assert run("config", "set", "keep_days", "none", "--dir", root).exit_code == 0
    assert said("--dir", root)["stored"]["keep_days"] is None
    assert file.read_text() == ""


@pytest.mark.parametrize(
    "line",
    ["max_bytes 9999999999999999999999", "max_files -1", "max_files none", "max_files \u0663", "keep_days -1",
     "keep_days nan", "keep_days inf", "load never", "paused maybe", "min_tokens 1e3x"],
)  # fmt: skip
def test_a_limit_or_rule_that_makes_no_sense_changes_nothing(file: Path, tmp_path: Path, line: str) -> None:
    root = tmp_path / "kv"
    rewarm.open(root).close()
    before = (root / "store.json").read_bytes()
    done = run("config", "set", *line.split(" "), "--dir", root)
    assert done.exit_code == 2, (done.output, done.exception)
    assert (root / "store.json").read_bytes() == before


def test_no_key_is_shown(file: Path) -> None:
    file.write_text('api_keys = ["very-secret-key-1234567890"]\n')
    for done in (run("config"), run("config", "--json")):
        assert done.exit_code == 0, done.output
        assert "very-secret" not in done.output


def test_every_name_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    for name in [*names_in_file(), *Limits.__struct_fields__, *Policy.__struct_fields__]:
        assert f"\n| `{name}` |" in text, name
