"""rewarm keeps the KV cache of local language models on disk and gives it back.

The names below are the public face; everything else may change between versions.
"""

from __future__ import annotations

from rewarm.cache.explain import Explanation
from rewarm.cache.identity import Identity
from rewarm.cache.jobs import SaveReport
from rewarm.cache.namespace import Match, Namespace
from rewarm.cache.policy import Policy
from rewarm.cache.prefix_cache import CloseReport, PrefixCache
from rewarm.cache.prefix_cache import open_cache as open  # noqa: A004  # rewarm.open, as the design names it
from rewarm.errors import EngineError, RewarmError, RootError, SettingsError
from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.reason import Boundary, Dropped, Reason
from rewarm.state.sequence import Opaque, Rows, SequenceState, Window
from rewarm.store.entries import Entry
from rewarm.store.room import Removal
from rewarm.store.settings import Limits

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "CloseReport",
    "Dropped",
    "EngineError",
    "Entry",
    "Explanation",
    "Identity",
    "Kind",
    "Layout",
    "Limits",
    "Match",
    "Namespace",
    "Opaque",
    "Policy",
    "PrefixCache",
    "Reason",
    "Removal",
    "RewarmError",
    "RootError",
    "Rows",
    "SaveReport",
    "SequenceState",
    "SettingsError",
    "TensorSpec",
    "Window",
    "open",
]
