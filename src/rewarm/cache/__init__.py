"""What engines talk to: find a stored prefix, restore it, save what is new."""
