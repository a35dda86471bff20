"""All events and commands of a simulated run, for tests."""

from __future__ import annotations


class Recorded:
    """Writes down a run: ``entries`` are (seconds, event or command)."""

    def __init__(self):
        self.entries = []
        self.events = []

    def event(self, time_s, event):
        self.entries.append((time_s, event))
        self.events.append(event)

    def command(self, time_s, command):
        self.entries.append((time_s, command))

    def of(self, *kinds):
        """Entries of some kinds."""
        return [entry for _, entry in self.entries if isinstance(entry, kinds)]
