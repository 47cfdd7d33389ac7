"""What the state of a sequence is, how it is named, and what of it can be restored. No I/O, no clock."""
