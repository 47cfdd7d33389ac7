"""Engines, one per room: a codec and a seam each. An engine package is imported in its own room only."""
