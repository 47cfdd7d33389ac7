"""One module for each family of mlx-lm's cache classes, in one table by the exact class.

`rewarm.adapters.mlx.codec` is the face; nothing else uses these modules.
"""
