"""Records as bytes: written once, self-describing, verified before anything is allocated. No I/O."""
