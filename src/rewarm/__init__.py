"""rewarm keeps the KV cache of local language models on disk and gives it back."""

from __future__ import annotations

from rewarm.state.layout import Kind, Layout, TensorSpec
from rewarm.state.reason import Boundary, Reason
from rewarm.state.sequence import Opaque, Rows, SequenceState, Window

__version__ = "0.1.0"

__all__ = [
    "Boundary",
    "Kind",
    "Layout",
    "Opaque",
    "Reason",
    "Rows",
    "SequenceState",
    "TensorSpec",
    "Window",
]
