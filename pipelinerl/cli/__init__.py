"""The command line; ``app`` lists the commands."""

from __future__ import annotations

import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of shells: 128 and the number of the signal."""


def main() -> None:
    """Run the command line. Ctrl-C before a command has begun is one line too: all imports are in here."""
    try:
        from pipelinerl.cli import app

        app.main()
    except KeyboardInterrupt:
        print("pipelinerl: interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
