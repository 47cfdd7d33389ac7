"""What a user who may not write everywhere meets: run as a process of its own, which gives its privileges up first.

    python unprivileged.py CASE FOLDER      FOLDER is empty, and everybody may write in it

Not a test module: `test_permissions.py` runs each case, as root too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import rewarm
from rewarm.errors import RootError
from rewarm.state.reason import Dropped, Reason
from rewarm.testing.driver import Driver, on_disk

NOBODY = 65534


def begin(folder: Path) -> Driver:
    """A cache with one conversation."""
    driver = Driver(folder / "kv", lossy=True)
    driver.save(range(11))
    driver.flush()
    return driver


def refused(driver: Driver, words: str) -> None:
    """Opening says why it cannot be done."""
    try:
        driver.open()
    except RootError as error:
        assert words in str(error), error
    else:
        raise AssertionError("a root that cannot be used was opened")


def works(driver: Driver) -> None:
    """What was there is there, and saving goes on."""
    assert driver.restore(range(12)).n_tokens == 11
    assert driver.save(range(100, 109)).wait(10)
    driver.flush()
    assert driver.restore(range(100, 110)).n_tokens == 9
    driver.assert_in_order()
    driver.close()


def an_index_that_may_only_be_read(folder: Path) -> None:
    driver = begin(folder)
    driver.close()
    path = driver.root / "index.db"
    path.chmod(0o400)
    refused(driver, "index")
    path.chmod(0o600)
    driver.open()
    works(driver)


def a_root_that_may_only_be_read(folder: Path) -> None:
    driver = begin(folder)
    driver.close()
    for path in (driver.root / "tmp", driver.root):
        path.chmod(0o500)
    refused(driver, "cannot be used")
    for path in (driver.root, driver.root / "tmp"):
        path.chmod(0o700)
    driver.open()
    works(driver)


def a_folder_that_becomes_read_only(folder: Path) -> None:
    driver = begin(folder)
    tmp = driver.root / "tmp"
    tmp.chmod(0o500)
    report = driver.save(range(500, 509))
    assert report.wait(10)
    assert report.reason is Dropped.UNAVAILABLE
    assert driver.restore(range(12)).n_tokens == 11
    tmp.chmod(0o700)
    works(driver)


def records_that_may_not_be_read(folder: Path) -> None:
    driver = begin(folder)
    records = on_disk(driver.root).records
    for path in records:
        path.chmod(0)
    state = driver.namespace().restore(driver.namespace().find(range(12)))
    assert (state.n_tokens, state.reason) == (0, Reason.UNAVAILABLE)
    driver.flush()
    assert on_disk(driver.root).records == records  # nothing was moved: it may pass
    for path in records:
        path.chmod(0o600)
    works(driver)


def records_that_may_not_be_removed(folder: Path) -> None:
    driver = begin(folder)
    folders = {path.parent for path in on_disk(driver.root).records}
    for path in folders:
        path.chmod(0o500)
    driver.cache.forget(driver.cache.entries()[0])
    assert driver.find(range(12)).n_tokens == 0  # gone for everybody, though its files are there
    for path in folders:
        path.chmod(0o700)
    driver.save(range(300, 309))
    driver.flush()
    assert len(on_disk(driver.root).records) == 3
    driver.close()


def settings_that_may_not_be_read(folder: Path) -> None:
    driver = begin(folder)
    driver.close()
    path = driver.root / "store.json"
    path.chmod(0)
    refused(driver, "The records are untouched")
    path.chmod(0o600)
    driver.open()
    works(driver)


def an_empty_folder_that_may_only_be_read(folder: Path) -> None:
    (folder / "kv").mkdir(mode=0o500)
    try:
        rewarm.open(folder / "kv")
    except RootError as error:
        assert "cannot be used" in str(error)
    else:
        raise AssertionError("a root that cannot be used was opened")


CASES: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        an_index_that_may_only_be_read,
        a_root_that_may_only_be_read,
        a_folder_that_becomes_read_only,
        records_that_may_not_be_read,
        records_that_may_not_be_removed,
        settings_that_may_not_be_read,
        an_empty_folder_that_may_only_be_read,
    )
}


def main() -> None:
    """Give privileges up, and go through one case."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    CASES[sys.argv[1]](Path(sys.argv[2]))


if __name__ == "__main__":
    main()
