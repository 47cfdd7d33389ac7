"""Admission: what of a save the user's rules let through, on the writer's thread, before it is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

from rewarm.cache.policy import Policy
from rewarm.state.reason import Dropped
from rewarm.store.saves import Draft, Save
from rewarm.store.store import Store


def admit(save: Save, policy: Policy, store: Store, day: int) -> tuple[Save, Dropped | None]:
    """What is left of `save`, from its first record on, and why that is not all.

    Args:
        save: what is to be written.
        policy: the rules in force.
        store: knows what was seen and written.
        day: today, days since 1970.

    Raises:
        IndexFault: the index cannot be used now.
    """
    save = replace(save, thin=policy.thin)
    if policy.second_sight:
        unseen = store.unseen([draft.name.key for draft in save.drafts])
        left = _until(save.drafts, lambda draft: draft.name.key in unseen)
        if len(left) < len(save.drafts):
            return replace(save, drafts=left), Dropped.FIRST_SIGHT
    if policy.write_bytes_per_day is not None:
        room = policy.write_bytes_per_day - store.written_on(day)
        taken = 0
        for i, draft in enumerate(save.drafts):
            taken += draft.nbytes
            if taken > room:
                return replace(save, drafts=save.drafts[:i]), Dropped.WRITE_BUDGET
    return save, None


def _until(drafts: tuple[Draft, ...], stops: Callable[[Draft], bool]) -> tuple[Draft, ...]:
    return tuple(itertools.takewhile(lambda draft: not stops(draft), drafts))
