"""Durable truth on one disk: records, their index, limits. Refuses nothing on policy grounds."""
