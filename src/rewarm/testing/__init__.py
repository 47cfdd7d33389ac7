"""Shipped test kit: an engine without a model, a perfect model of the cache, files with faults, conformance."""
