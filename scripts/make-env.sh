#!/bin/sh
# Makes .venv from requirements.lock and models.lock, or does nothing when it is there already.
# Touches nothing outside .venv. PYTHON=... chooses the interpreter of a new .venv.
set -eu
cd "$(dirname "$0")/.."

STAMP=.venv/rewarm-env.stamp

fail() {
    echo "make env: $*" >&2
    exit 1
}

# Prints X.Y of an interpreter that starts and is one of ours, else nothing: a pyenv shim, say, may be
# on the path and refuse to run.
version_of() {
    "$1" -c 'import sys
v = sys.version_info[:2]
if (3, 11) <= v <= (3, 13): print("%d.%d" % v)' 2>/dev/null || true
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        [ -n "$(version_of "$PYTHON")" ] ||
            fail "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13, or does not start. Nothing was changed."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3 python; do
        if [ -n "$(version_of "$candidate")" ]; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 was found on the path. Install one (https://www.python.org/downloads,
    'brew install python@3.12', or your distribution's python3.12 and python3.12-venv), or name it:
    make env PYTHON=/path/to/python3.12. Nothing was changed."
}

# What .venv must have been made from; it holds absolute paths, so a moved clone makes it anew.
wanted=$(pwd -P; cat pyproject.toml requirements.lock models.lock scripts/make-env.sh | cksum)

if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$wanted" ]; then
    if [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of .venv/bin/python)" ]; then
        exit 0
    fi
fi

rm -f "$STAMP"
fresh=no
if [ ! -e .venv ]; then
    fresh=yes
elif [ ! -f .venv/pyvenv.cfg ] && [ -n "$(ls -A .venv 2>/dev/null)" ]; then
    fail ".venv is there but is no virtual environment. Move it away and run this again. Nothing was changed."
elif ! .venv/bin/python -m pip --version >/dev/null 2>&1 || [ -z "$(version_of .venv/bin/python)" ]; then
    fresh=yes # half made, or its Python has gone
elif [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON")" != "$(version_of .venv/bin/python)" ]; then
    fresh=yes
elif ! grep -qsF "$(pwd -P)/.venv" .venv/bin/activate; then
    fresh=yes # moved or copied
fi

if [ "$fresh" = yes ]; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments: its modules venv and ensurepip are missing.
    On Debian and Ubuntu: apt install python$(version_of "$python")-venv. Nothing was changed."
    echo "make env: making .venv with $python ($(version_of "$python"))" >&2
    "$python" -m venv --clear .venv || fail "$python -m venv failed; its message is above."
fi

# Quiet, since pip may warn about every link of a local package folder; real errors are kept and shown.
install() {
    log=.venv/pip.log
    if ! PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 \
        .venv/bin/python -m pip install --quiet --quiet --no-deps "$@" >"$log" 2>&1; then
        grep -v '^WARNING: ' "$log" >&2 || cat "$log" >&2
        fail "pip could not install what the lock names; its message is above. Run this again to go on."
    fi
}

echo "make env: installing the locked packages into .venv (about 1 GB; minutes the first time)" >&2
install --require-hashes -r requirements.lock
install --require-hashes -r models.lock
install --no-build-isolation --editable .
echo "$wanted" >"$STAMP"
echo "make env: .venv is ready" >&2
