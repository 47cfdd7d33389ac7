"""Benchmarks of rewarm: `python -m benchmarks` (or `make bench`). Not part of the package."""
