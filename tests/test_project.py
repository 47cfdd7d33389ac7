"""The project itself: sizes, names, versions, lock files, links, and the script that makes the environment."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import rewarm

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 50
JUNK_DRAWERS = {"utils", "util", "helpers", "helper", "common", "core", "misc"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            n_lines = (node.end_lineno or 0) - node.lineno + 1
            if is_documented:
                n_lines -= (first.end_lineno or 0) - first.lineno + 1
            assert n_lines <= MAX_FUNCTION_LINES, f"{node.name}: {n_lines} lines without its docstring"


def test_no_module_is_a_junk_drawer() -> None:
    names = {part.removesuffix(".py") for path in SOURCES for part in path.relative_to(ROOT / "src").parts}
    assert not names & JUNK_DRAWERS


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names))


def test_no_browser_test_is_faster_than_the_page() -> None:
    """Keys pressed before a field has the focus, and clicks before the page has its socket, go nowhere: only the
    helpers in `tests/browser/conftest.py`, which wait, press keys and open pages. Tab alone needs neither.
    """
    hasty = re.compile(r"\.keyboard\.(?!press\(\"Tab\"\))|\.goto\(|\.reload\(")
    for path in sorted((ROOT / "tests" / "browser").glob("test_*.py")):
        assert not hasty.findall(path.read_text()), path.name


def test_the_public_list_is_sorted_and_true() -> None:
    assert rewarm.__all__ == sorted(rewarm.__all__)
    for name in rewarm.__all__:
        assert hasattr(rewarm, name), name


def test_one_version_everywhere() -> None:
    assert PROJECT["project"]["version"] == rewarm.__version__
    assert f"## {rewarm.__version__}" in (ROOT / "CHANGELOG.md").read_text()


# The lock files.


def pins(name: str) -> dict[str, str]:
    """Each requirement of a lock file by its name, with its options."""
    joined = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return {re.split(r"[=\[ ]", line, maxsplit=1)[0]: line for line in lines}


def normal(requirement: str) -> str:
    return re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize("name", ["requirements.lock", "models.lock"])
def test_every_locked_package_has_a_version_and_a_hash_and_no_address(name: str) -> None:
    for line in pins(name).values():
        assert re.match(r"\S+==\S+", line), line
        assert "--hash=sha256:" in line, line
        assert "://" not in line, line


def test_everything_that_is_asked_for_is_locked() -> None:
    project = PROJECT["project"]
    asked = [*project["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    asked += [line for name, lines in project["optional-dependencies"].items() if name != "all" for line in lines]
    assert {normal(line) for line in asked} <= set(pins("requirements.lock"))


def test_the_extra_all_has_all_others() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = re.findall(r"\[(.*)\]", extras["all"][0])[0].split(",")
    assert sorted(named) == sorted(name for name in extras if name != "all")


# The documents.


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", path.read_text()):
        link = target[0] or target[1]
        if "://" not in link:
            assert (path.parent / link).exists(), link


def test_every_make_target_is_in_contributing() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for target in targets:
        assert f"make {target}" in text, target


# The environment script: it must end in words, and touch nothing, wherever it cannot go on.


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A bare clone, as far as the script looks at it."""
    folder = tmp_path / "a clone"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/make-env.sh", "pyproject.toml", "requirements.lock", "models.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make_env(clone: Path, path: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    shell = shutil.which("sh")
    assert shell
    return subprocess.run(
        [shell, str(clone / "scripts" / "make-env.sh")],
        env={"PATH": str(path), "HOME": str(clone), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def tools(folder: Path, **programs: str) -> Path:
    """A folder for PATH with what the script calls, and `programs` (name and script)."""
    folder.mkdir()
    for name in ("cat", "cksum", "dirname", "grep", "ls", "rm"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


needs_posix = pytest.mark.skipif(os.name == "nt", reason="the script is for POSIX shells")


@needs_posix
def test_no_python_is_told(clone: Path, tmp_path: Path) -> None:
    done = make_env(clone, tools(tmp_path / "bin", python3="exit 127"))
    assert done.returncode == 1
    assert "no Python 3.11, 3.12 or 3.13 was found" in done.stderr
    assert not (clone / ".venv").exists()


@needs_posix
def test_a_wrong_python_is_told(clone: Path, tmp_path: Path) -> None:
    done = make_env(clone, tools(tmp_path / "bin", old="exit 1"), PYTHON="old")
    assert done.returncode == 1
    assert "PYTHON=old is no Python 3.11, 3.12 or 3.13" in done.stderr


@needs_posix
def test_a_python_without_venv_is_told(clone: Path, tmp_path: Path) -> None:
    python = 'case "$*" in *ensurepip*) exit 1 ;; *) echo 3.12 ;; esac'
    done = make_env(clone, tools(tmp_path / "bin", **{"python3.12": python}))
    assert done.returncode == 1
    assert "venv and ensurepip are missing" in done.stderr
    assert not (clone / ".venv").exists()


@needs_posix
def test_a_folder_that_is_no_environment_is_left_alone(clone: Path, tmp_path: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "mine").write_text("precious")
    done = make_env(clone, tools(tmp_path / "bin"))
    assert done.returncode == 1
    assert "is no virtual environment" in done.stderr
    assert (clone / ".venv" / "mine").read_text() == "precious"


@needs_posix
def test_pips_error_is_shown_and_its_warnings_are_not(clone: Path, tmp_path: Path) -> None:
    """And the stamp is not set, so that the next run goes on."""
    pip = 'case "$*" in *--version*) ;; *) echo "WARNING: a link"; echo "ERROR: no such wheel"; exit 1 ;; esac'
    fake = f'case "$*" in "-m pip"*) {pip} ;; *) echo 3.12 ;; esac'
    home = tools(clone / ".venv")
    (home / "bin").mkdir()
    (home / "pyvenv.cfg").touch()
    (home / "bin" / "activate").write_text(f"VIRTUAL_ENV='{home.resolve()}'\n")
    (home / "bin" / "python").write_text(f"#!/bin/sh\n{fake}\n")
    (home / "bin" / "python").chmod(0o755)
    done = make_env(clone, tools(tmp_path / "bin"))
    assert done.returncode == 1
    assert "ERROR: no such wheel" in done.stderr
    assert "WARNING" not in done.stderr
    assert not (home / "rewarm-env.stamp").exists()


@needs_posix
def test_nothing_is_done_when_nothing_changed(clone: Path, tmp_path: Path) -> None:
    """It starts no Python at all: there is none on the path, and none in .venv."""
    path = tools(tmp_path / "bin")
    files = ("pyproject.toml", "requirements.lock", "models.lock", "scripts/make-env.sh")
    joined = b"".join((clone / name).read_bytes() for name in files)
    sum_ = subprocess.run(["cksum"], input=joined, capture_output=True).stdout.decode()
    (clone / ".venv").mkdir()
    (clone / ".venv" / "rewarm-env.stamp").write_text(f"{clone.resolve()}\n{sum_}")
    done = make_env(clone, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with (clone / "requirements.lock").open("a") as file:
        file.write("# changed\n")
    assert make_env(clone, path).returncode == 1
