"""The part that decides: no clock, no I/O, no randomness; only the standard library."""
