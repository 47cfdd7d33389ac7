"""The configuration file: one TOML file that says where things are and how they start.

Knows where it is, how it is read, and how one line of it is changed; not what its names mean, but for `dir`, the
cache folder. Limits and rules are not in it: they live in the cache folder, so that whoever uses that heeds them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import platformdirs

from rewarm.errors import ConfigurationError

VARIABLE = "REWARM_CONFIG"
"""The environment variable that names the file."""

Value = str | int | float | bool | list[str]
"""What `write_value` can write."""

_TABLE = re.compile(r"^\s*\[", re.MULTILINE)


def config_path() -> Path:
    """Where the file is, or would be: what `REWARM_CONFIG` names, else in the user's configuration folder."""
    named = os.environ.get(VARIABLE)
    return expanded(named) if named else platformdirs.user_config_path("rewarm") / "config.toml"


def read_config() -> dict[str, Any]:
    """What the file says, by name; nothing where there is no file.

    Raises:
        ConfigurationError: it cannot be read, is no TOML, or `REWARM_CONFIG` names a file that is not there.
    """
    path = config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get(VARIABLE):
            raise ConfigurationError(
                f"{VARIABLE} names {path}, where there is no file. Nothing was done. Make it, or unset {VARIABLE}."
            ) from None
        return {}
    except (OSError, ValueError) as error:  # a UnicodeDecodeError is a ValueError
        raise _unreadable(path, error) from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:  # a number of too many digits
        raise _unreadable(path, error) from None


def configured_root() -> Path | None:
    """The cache folder that the file names as `dir`, if it does.

    Raises:
        ConfigurationError: the file cannot be read, or `dir` is no path.
    """
    named = read_config().get("dir")
    if named is None:
        return None
    if not isinstance(named, str) or not named.strip() or "\0" in named:
        raise ConfigurationError(f"dir in {config_path()} is {named!r}, which is no path of a folder.")
    return from_file(named)


def from_file(named: str) -> Path:
    """A path in the file: `~` is the home folder, and a relative one counts from the file's own folder."""
    return config_path().parent.absolute() / expanded(named)


def expanded(named: str | os.PathLike[str]) -> Path:
    """`named` with `~` for the home folder.

    Raises:
        ConfigurationError: there is no such home folder.
    """
    try:
        return Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{os.fspath(named)!r} is no path here: {error}") from None


def write_value(name: str, value: Value | None) -> Path:
    """Set `name` in the file, which is made if there is none, or take it out (None); the rest stays as it is.

    Returns:
        The file.

    Raises:
        ConfigurationError: the file cannot be read or written, or is laid out so that one line does not do.
    """
    path = config_path()
    before = read_config() if path.exists() or not os.environ.get(VARIABLE) else {}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except OSError as error:
        raise _unreadable(path, error) from None
    wanted = {key: each for key, each in before.items() if key != name}
    if value is not None:
        wanted[name] = value
    changed = _changed(text, name, value)
    try:
        fits = tomllib.loads(changed) == wanted
    except tomllib.TOMLDecodeError:
        fits = False
    if not fits:
        raise ConfigurationError(f"{name} in {path} takes several lines or tables. Nothing was changed; edit it there.")
    try:
        _replace(path, changed)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}. Nothing was changed.") from None
    return path


def _changed(text: str, name: str, value: Value | None) -> str:
    """`text` with the line of `name` replaced, taken out, or put behind the last line that is in no table."""
    line = "" if value is None else f"{name} = {_toml(value)}\n"
    top = _TABLE.search(text)
    end = top.start() if top else len(text)
    head, tail = text[:end], text[end:]
    there = re.compile(rf"^[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*=.*(?:\n|\Z)", re.MULTILINE)
    if there.search(head):
        return there.sub(lambda _: line, head, count=1) + tail
    if head and not head.endswith("\n"):
        head += "\n"
    return head + line + tail


def _toml(value: Value) -> str:
    """A value as TOML writes it: for these kinds as JSON does, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    """Write the file anew, whole or not at all, through a link to where it is."""
    path = Path(os.path.realpath(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, part = tempfile.mkstemp(prefix=".config-", suffix=".part", dir=path.parent)  # 0600: keys may be in it
    try:
        with os.fdopen(fd, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    why = error.strerror or error if isinstance(error, OSError) else error
    return ConfigurationError(
        f"The configuration file {path} cannot be read ({why}). Nothing was done. Mend it, or move it away: every "
        "setting then has its default."
    )
