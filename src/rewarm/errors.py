"""Every error that rewarm raises, and the exit code that the command line gives for it.

A cache fault is never one of these: it is a miss with a reason. Errors are for wrong calls, for a root
that cannot be opened, and inside the store, where the facade turns them into reasons.

    RewarmError
    ├── RootError              the cache folder cannot be opened or used
    │   ├── SettingsError      store.json cannot be read or has values out of range
    │   └── ConfigurationError the configuration file cannot be read or makes no sense
    ├── RecordError            a record cannot be used; carries no judgement on its file
    │   ├── DamagedRecord      provably bad: goes to quarantine
    │   └── NewerFormat        written by a later version: left alone
    ├── IndexFault             the SQLite index is busy, full, read-only or broken
    ├── EngineError            an engine cannot be started or used
    └── GatewayError           the gateway cannot be opened
"""

from __future__ import annotations


class RewarmError(Exception):
    """Base of all errors of rewarm."""

    exit_code = 1


class RootError(RewarmError):
    """The cache folder cannot be opened or used."""

    exit_code = 3


class SettingsError(RootError):
    """`store.json` cannot be read, or holds values out of range."""


class ConfigurationError(RootError):
    """The configuration file cannot be read or changed, or says what makes no sense."""

    exit_code = 2


class RecordError(RewarmError):
    """A record cannot be used."""


class DamagedRecord(RecordError):
    """A record is provably bad: torn, flipped, foreign or misnamed."""


class NewerFormat(RecordError):
    """A record was written by a later version of rewarm."""


class IndexFault(RewarmError):
    """The index cannot answer now: busy, full, read-only or broken."""

    def __init__(self, message: str, *, broken: bool = False) -> None:
        super().__init__(message)
        self.broken = broken


class EngineError(RewarmError):
    """An engine cannot be started or used."""

    exit_code = 4


class GatewayError(RewarmError):
    """The gateway cannot be opened: a setting makes no sense, or its address is taken."""

    exit_code = 5
