"""Look at every record: verify what the index says, and build the index anew from the files.

Touches only files that have the names of records. It runs under the facade's lock and knows no engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from rewarm.errors import DamagedRecord, NewerFormat
from rewarm.store.files import Files
from rewarm.store.index import Index

log = logging.getLogger("rewarm.store")


@dataclass(slots=True)
class Report:
    """What a look at every record found.

    Attributes:
        n_good: records whose every byte is right.
        n_newer: records of a later format, left alone.
        n_unreadable: files that could not be read now, left alone.
        damaged: names of bad files, and what is wrong with them.
        missing: records that the index knows and the disk does not.
        unknown: files with a record's name that the index does not know.
    """

    n_good: int = 0
    n_newer: int = 0
    n_unreadable: int = 0
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether index and files agree and nothing is bad."""
        return not (self.damaged or self.missing or self.unknown or self.n_unreadable)


def verify(index: Index, files: Files) -> Report:
    """Read every record that the index or the disk knows; changes nothing."""
    report = Report()
    known = {row.name for row in index.by_use()}
    on_disk = set(files.records())
    report.missing = sorted(name.file_name for name in known - on_disk)
    report.unknown = sorted(name.file_name for name in on_disk - known)
    for name in sorted(on_disk, key=lambda each: each.key):
        try:
            files.read(name)
            report.n_good += 1
        except DamagedRecord as error:
            report.damaged.append((name.file_name, str(error)))
        except NewerFormat:
            report.n_newer += 1
        except FileNotFoundError:
            continue  # evicted since the tree was listed
        except OSError:
            report.n_unreadable += 1
    return report
