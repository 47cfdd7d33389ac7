"""`/api` on what is kept: entries, settings, place, counters. Described by `/openapi.json`; knows no page."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field

from rewarm.gateway import entry_list
from rewarm.gateway.cache_admin import CacheAdmin
from rewarm.gateway.entry_list import MAX_ROWS, Row, Sort
from rewarm.gateway.relocation import Records, Stage
from rewarm.store.room import Removal

Id = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The entry's id: 32 hex characters.")]
Fingerprint = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class EntryReport(BaseModel):
    """A named end of a conversation.

    Attributes:
        id: 32 hex characters.
        title: the conversation's, else the label, else what ended there.
        label: what the request named it (`X-Rewarm-Conversation`), or null.
        model: whose it is.
        fingerprint: of that model, 64 hex characters.
        n_tokens: tokens up to its end.
        nbytes: of all that it needs.
        own_nbytes: of what only it needs; forgetting it frees so much.
        boundary: what ended there.
        pinned: whether it is spared when room is made.
        hits: restores that used its end.
        created_s, matched_s: when it was made and last matched or saved, seconds since 1970.
        parent: id of the older entry that it branched off, or null.
        fork_tokens: tokens up to where it did.
    """

    id: str
    title: str
    label: str | None
    model: str
    fingerprint: str
    n_tokens: int
    nbytes: int
    own_nbytes: int
    boundary: str
    pinned: bool
    hits: int
    created_s: float
    matched_s: float
    parent: str | None
    fork_tokens: int


class EntryPage(BaseModel):
    """A page of entries: how many match, how many there are."""

    entries: list[EntryReport]
    n_found: int
    n_all: int


class RemovalReport(BaseModel):
    """What was removed, or would be: files, and bytes rounded up to 4 KiB each."""

    dry_run: bool
    n_files: int
    nbytes: int


class PinReport(BaseModel):
    """Whether an entry is pinned."""

    id: str
    pinned: bool


class LimitReport(BaseModel):
    """How much the folder may hold.

    Attributes:
        max_bytes: of records, temporaries, quarantine and index.
        max_files: of records, temporaries and quarantine.
        min_free_bytes: that stay free on the disk.
    """

    max_bytes: int
    max_files: int
    min_free_bytes: int


class PolicyReport(BaseModel):
    """The rules in force.

    Attributes:
        load: `worth`: what is quicker to load than to read anew; `always`.
        min_tokens: shorter states are not saved.
        second_sight: a block is written when it is seen for the second time only.
        write_bytes_per_day: the most that is written on one day (UTC), or null.
        keep_days: entries unmatched for so long are forgotten; null keeps them.
        thin: only some restore points of a conversation are kept.
        paused: nothing is read or written.
        save_at: when a conversation's end is saved.
    """

    load: Literal["worth", "always"]
    min_tokens: int
    second_sight: bool
    write_bytes_per_day: int | None
    keep_days: float | None
    thin: bool
    paused: bool
    save_at: Literal["turn", "idle", "unload"]


class SettingsReport(BaseModel):
    """Where the cache is, its limits, its rules.

    Attributes:
        folder: where it is.
        folder_forced_by: what named it at the start, and will name it at the next; "" when the page's choice counts.
        limits: how much it may hold.
        limits_at_start: those that an argument or the environment sets anew at each start.
        policy: the rules.
    """

    folder: str
    folder_forced_by: str
    limits_at_start: list[str]
    limits: LimitReport
    policy: PolicyReport


class SettingsChange(BaseModel):
    """What is to be changed; a field that is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")

    max_bytes: Bytes = 0
    max_files: Bytes = 0
    min_free_bytes: Bytes = 0
    load: Literal["worth", "always"] = "worth"
    min_tokens: Bytes = 0
    second_sight: bool = False
    write_bytes_per_day: Bytes | None = None
    keep_days: Annotated[float, Field(ge=0, lt=2**53)] | None = None
    thin: bool = True
    paused: bool = False
    save_at: Literal["turn", "idle", "unload"] = "turn"


LIMITS = ("max_bytes", "max_files", "min_free_bytes")


class SettingsChanged(SettingsReport):
    """The settings after a change, and what it evicted."""

    evicted: RemovalReport


class MoveRequest(BaseModel):
    """Where the cache is to be.

    Attributes:
        path: absolute, or from ~ on.
        records: `move` brings over what is kept; `leave` leaves it where it is.
        dry_run: only say what the folder is like.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    records: Records = "move"
    dry_run: bool = False


class LocationReport(BaseModel):
    """What a folder is like as a place for the cache; `problem` says why it cannot be used, or ""."""

    path: str
    problem: str
    warnings: list[str]
    free_bytes: int | None
    total_bytes: int | None
    holds_cache: bool
    needed_bytes: int


class MoveReport(BaseModel):
    """A change of the folder, as far as it is."""

    stage: Stage
    source: str
    target: str
    done_bytes: int
    total_bytes: int
    message: str
    unloaded: list[str]
    left_behind: list[str]


class ExplainRequest(BaseModel):
    """A prompt of a model, as token ids."""

    fingerprint: Fingerprint
    tokens: Annotated[list[int], Field(max_length=4_000_000)]


class ExplainReport(BaseModel):
    """What a prompt would find now, and why not more."""

    prompt_tokens: int
    restorable_tokens: int
    reason: str
    detail: dict[str, Any]
    before: list[int]
    sentence: str


class ClearRequest(BaseModel):
    """What is to be erased.

    Attributes:
        fingerprint: of one model; null: everything.
        dry_run: only say what would be erased; the default.
    """

    fingerprint: Fingerprint | None = None
    dry_run: bool = True


class ModelUseReport(BaseModel):
    """What one model keeps."""

    fingerprint: str
    name: str
    n_files: int
    nbytes: int


class RepliesReport(BaseModel):
    """What the latest replies come to; the times are medians over streamed ones, null where there is none."""

    n_replies: int
    n_misses: int
    n_bypassed: int
    prompt_tokens: int
    disk_tokens: int
    memory_tokens: int
    saved_s: float
    ttft_restored_s: float | None
    ttft_prefilled_s: float | None


class MissReport(BaseModel):
    """A reply of which nothing was reused."""

    at_s: float
    model: str
    prompt_tokens: int
    reason: str
    detail: str
    ttft_s: float | None


class StatsReport(BaseModel):
    """The cache folder: where it is, its limits, its counters; and what the cache did of late.

    Attributes:
        folder: where it is.
        usable: whether it can be used; if not, replies are computed without it.
        problem: why it cannot.
        limits: `max_bytes`, `max_files`, `min_free_bytes`.
        counters: see `PrefixCache.stats`.
        models: what each model keeps.
        replies: the latest replies of this gateway, since it started.
        misses: the latest of them of which nothing was reused.
    """

    folder: str
    usable: bool
    problem: str
    limits: dict[str, int | None]
    counters: dict[str, int | dict[str, int]]
    models: list[ModelUseReport]
    replies: RepliesReport
    misses: list[MissReport]


def cache_routes(admin: CacheAdmin) -> APIRouter:
    """The routes under `/api` on what is kept; to be included before those that answer all of `/api`."""
    router = APIRouter(prefix="/api", tags=["cache"])
    _entries(router, admin)
    _settings(router, admin)
    _looking(router, admin)
    return router


def _entries(router: APIRouter, admin: CacheAdmin) -> None:
    disk, entries = admin.disk_cache, admin.entries

    @router.get("/entries")
    def list_entries(
        search: Annotated[str, Query(max_length=200)] = "",
        sort: Sort = "matched",
        order: Literal["asc", "desc"] = "desc",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 25,
        fingerprint: Annotated[str | None, Query(pattern="^[0-9a-f]{64}$")] = None,
    ) -> EntryPage:
        """What is kept: searched, sorted, a page at a time."""
        query = entry_list.Query(search, sort, order == "desc", offset, limit, fingerprint)
        found = entries.find(query)
        return EntryPage(entries=[_entry(row) for row in found.rows], n_found=found.n_found, n_all=found.n_all)

    @router.post("/entries/{entry_id}/pin")
    def pin(entry_id: Id) -> PinReport:
        """Spare an entry, and all that it needs, when room is made."""
        disk.pin(entry_id, pinned=True)
        entries.changed()
        return PinReport(id=entry_id, pinned=True)

    @router.post("/entries/{entry_id}/unpin")
    def unpin(entry_id: Id) -> PinReport:
        """Spare it no more."""
        disk.pin(entry_id, pinned=False)
        entries.changed()
        return PinReport(id=entry_id, pinned=False)

    @router.delete("/entries/{entry_id}")
    def forget(entry_id: Id, *, dry_run: bool = False) -> RemovalReport:
        """Erase an entry and what only it needs."""
        removal = disk.forget(entry_id, dry_run=dry_run)
        entries.changed()
        return _removal(removal, dry_run=dry_run)


def _settings(router: APIRouter, admin: CacheAdmin) -> None:
    disk, relocation = admin.disk_cache, admin.relocation

    @router.get("/settings")
    def settings() -> SettingsReport:
        """Where the cache is, its limits, its rules."""
        return SettingsReport(**_settings_now(admin))

    @router.patch("/settings")
    def change(wanted: SettingsChange) -> SettingsChanged:
        """Change limits and rules; takes effect at once, in every worker, and says what was evicted."""
        given = wanted.model_dump(exclude_unset=True)
        limits = {name: value for name, value in given.items() if name in LIMITS}
        rules = {name: value for name, value in given.items() if name not in LIMITS}
        removal = disk.change(limits, rules)
        admin.entries.changed()
        return SettingsChanged(**_settings_now(admin), evicted=_removal(removal, dry_run=False))

    @router.post("/move")
    async def move(wanted: MoveRequest) -> LocationReport | MoveReport:
        """Use another folder from now on; returns when it has begun. With `dry_run`, say what it is like."""
        if wanted.dry_run:
            checked = await asyncio.to_thread(relocation.check, wanted.path)
            return LocationReport(**{**asdict(checked), "path": str(checked.path)})
        return MoveReport(**asdict(await relocation.start(wanted.path, wanted.records)))

    @router.get("/move")
    async def move_progress() -> MoveReport:
        """How far the last change of the folder is."""
        return MoveReport(**asdict(relocation.progress))

    @router.delete("/move")
    async def stop_move() -> MoveReport:
        """Leave the records where they were, if they are being moved."""
        await relocation.stop()
        return MoveReport(**asdict(relocation.progress))

    @router.post("/clear")
    def clear(wanted: ClearRequest) -> RemovalReport:
        """Erase everything, or everything of one model, pinned entries too; only says what, unless told otherwise."""
        removal = disk.clear(wanted.fingerprint, dry_run=wanted.dry_run)
        admin.entries.changed()
        return _removal(removal, dry_run=wanted.dry_run)


def _looking(router: APIRouter, admin: CacheAdmin) -> None:
    disk = admin.disk_cache

    @router.get("/stats")
    def stats() -> StatsReport:
        """The cache folder, its limits and its counters; what each model keeps; what the cache did of late."""
        report = disk.report()
        return StatsReport(
            **report,
            models=[ModelUseReport(**asdict(use)) for use in (disk.models() if report["usable"] else [])],
            replies=RepliesReport(**asdict(disk.replies.summary())),
            misses=[
                MissReport(**{name: getattr(reply, name) for name in MissReport.model_fields})
                for reply in disk.replies.misses(20)
            ],
        )

    @router.post("/explain")
    def explain(wanted: ExplainRequest) -> ExplainReport:
        """What a prompt would find now, and why not more; counts as no use."""
        found = disk.explain(wanted.fingerprint, wanted.tokens)
        return ExplainReport(**found.as_dict(), sentence=found.sentence())


def _entry(row: Row) -> EntryReport:
    return EntryReport(**asdict(row.entry), title=row.title, model=row.model)


def _removal(removal: Removal, *, dry_run: bool) -> RemovalReport:
    return RemovalReport(dry_run=dry_run, n_files=removal.n_files, nbytes=removal.nbytes)


def _settings_now(admin: CacheAdmin) -> dict[str, Any]:
    limits, policy = admin.disk_cache.rules()
    return {
        "folder": str(admin.disk_cache.folder),
        "folder_forced_by": admin.disk_cache.place.forced_by,
        "limits": msgspec.to_builtins(limits),
        "limits_at_start": list(admin.disk_cache.limits_at_start),
        "policy": msgspec.to_builtins(policy),
    }
