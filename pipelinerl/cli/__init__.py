"""The command line; ``app`` lists the commands."""

from pipelinerl.cli.app import app, main

__all__ = ["app", "main"]
