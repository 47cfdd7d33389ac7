"""The index's tables. Totals are kept by triggers, never by hand; the rest is in `index.py` and `entries.py`."""

from __future__ import annotations

VERSION = 1
PAGE_NBYTES = 8192
"""So that a block's tokens fit a page of the ordered index without overflowing it."""

SCHEMA = """
CREATE TABLE counters (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE namespaces (
    id          INTEGER PRIMARY KEY,
    fingerprint BLOB NOT NULL UNIQUE
);

-- Layouts that a namespace has records of: find asks each of them.
CREATE TABLE layouts (
    namespace INTEGER NOT NULL REFERENCES namespaces (id),
    digest    BLOB NOT NULL,
    spec      BLOB NOT NULL,
    PRIMARY KEY (namespace, digest)
) WITHOUT ROWID;

CREATE TABLE records (
    id        INTEGER PRIMARY KEY,
    key       BLOB NOT NULL UNIQUE,
    parent    BLOB NOT NULL,
    is_point  INTEGER NOT NULL,
    tokens    BLOB NOT NULL,              -- its own, in ordered form
    namespace INTEGER NOT NULL REFERENCES namespaces (id),
    layout    BLOB NOT NULL,
    n         INTEGER NOT NULL,           -- tokens at its end
    after     BLOB,                       -- point that its window runs begin behind
    nbytes    INTEGER NOT NULL,           -- of the file, rounded up to 4 KiB
    used      INTEGER NOT NULL,           -- recency
    condemned INTEGER NOT NULL DEFAULT 0  -- the intent that removes it, or 0
);
CREATE INDEX records_in_order ON records (parent, is_point, tokens);
CREATE INDEX records_by_use ON records (used, n DESC) WHERE condemned = 0;
CREATE INDEX records_condemned ON records (condemned) WHERE condemned != 0;
CREATE INDEX records_after ON records (after) WHERE after IS NOT NULL;
CREATE INDEX records_by_namespace ON records (namespace);

-- What a process is about to write and remove; finished by others when it dies.
CREATE TABLE intents (
    id      INTEGER PRIMARY KEY,
    process TEXT NOT NULL,
    bytes   INTEGER NOT NULL,
    files   INTEGER NOT NULL,
    erases  INTEGER NOT NULL DEFAULT 0    -- on request: what it removes must never be found again
);
CREATE TABLE intent_writes (
    intent      INTEGER NOT NULL REFERENCES intents (id),
    position    INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    key         BLOB NOT NULL,
    is_point    INTEGER NOT NULL,
    PRIMARY KEY (intent, position)
) WITHOUT ROWID;

CREATE TABLE quarantine (
    id     INTEGER PRIMARY KEY,
    name   TEXT NOT NULL UNIQUE,
    nbytes INTEGER NOT NULL
);

-- Named ends of chains. "parent" and "tail" say where the end is: tokens past the last full block.
CREATE TABLE entries (
    id        BLOB PRIMARY KEY,
    namespace INTEGER NOT NULL REFERENCES namespaces (id),
    layout    BLOB NOT NULL,
    "end"     BLOB NOT NULL,              -- key of the record at its end
    parent    BLOB NOT NULL,
    tail      BLOB NOT NULL,
    n         INTEGER NOT NULL,
    label     TEXT,
    boundary  TEXT NOT NULL,
    pinned    INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    matched_s REAL NOT NULL,
    hits      INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX entries_by_end ON entries ("end");
CREATE INDEX entries_by_parent ON entries (parent);

-- Keys of the last records that were evicted, so that a miss can say so.
CREATE TABLE evicted (
    id  INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE
);

-- Keys seen once, where a rule lets only what is seen twice be written.
CREATE TABLE sightings (
    id  INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE
);

-- What was forgotten on request, until every living process has taken note.
CREATE TABLE forgotten (
    key    BLOB PRIMARY KEY,
    number INTEGER NOT NULL,
    length INTEGER NOT NULL               -- of a point: where it ends; 0 of a block
) WITHOUT ROWID;
CREATE TABLE processes (
    process TEXT PRIMARY KEY,
    noted   INTEGER NOT NULL
) WITHOUT ROWID;

-- Where a chain went on from a record that is gone, so that what hangs below can be told apart still.
CREATE TABLE holes (
    key    BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    tokens BLOB NOT NULL
) WITHOUT ROWID;

CREATE TABLE totals (
    id               INTEGER PRIMARY KEY CHECK (id = 1),
    record_bytes     INTEGER NOT NULL DEFAULT 0,
    record_files     INTEGER NOT NULL DEFAULT 0,
    reserved_bytes   INTEGER NOT NULL DEFAULT 0,
    reserved_files   INTEGER NOT NULL DEFAULT 0,
    quarantine_bytes INTEGER NOT NULL DEFAULT 0,
    quarantine_files INTEGER NOT NULL DEFAULT 0
);
INSERT INTO totals (id) VALUES (1);

CREATE TRIGGER record_in AFTER INSERT ON records BEGIN
    UPDATE totals SET record_bytes = record_bytes + NEW.nbytes, record_files = record_files + 1;
END;
CREATE TRIGGER record_out AFTER DELETE ON records BEGIN
    UPDATE totals SET record_bytes = record_bytes - OLD.nbytes, record_files = record_files - 1;
END;
CREATE TRIGGER record_resized AFTER UPDATE OF nbytes ON records BEGIN
    UPDATE totals SET record_bytes = record_bytes + NEW.nbytes - OLD.nbytes;
END;
CREATE TRIGGER intent_in AFTER INSERT ON intents BEGIN
    UPDATE totals SET reserved_bytes = reserved_bytes + NEW.bytes, reserved_files = reserved_files + NEW.files;
END;
CREATE TRIGGER intent_out AFTER DELETE ON intents BEGIN
    UPDATE totals SET reserved_bytes = reserved_bytes - OLD.bytes, reserved_files = reserved_files - OLD.files;
END;
CREATE TRIGGER quarantine_in AFTER INSERT ON quarantine BEGIN
    UPDATE totals SET quarantine_bytes = quarantine_bytes + NEW.nbytes, quarantine_files = quarantine_files + 1;
END;
CREATE TRIGGER quarantine_out AFTER DELETE ON quarantine BEGIN
    UPDATE totals SET quarantine_bytes = quarantine_bytes - OLD.nbytes, quarantine_files = quarantine_files - 1;
END;
"""
