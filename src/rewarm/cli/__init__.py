"""The command line: one file per command. The layer above everything; nothing imports it."""
