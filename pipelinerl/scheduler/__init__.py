"""Schedulers: events in, commands out. The standard library only; no clock, no files, no randomness."""
