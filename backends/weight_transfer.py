"""Placeholder."""


def register() -> None:
    """Register."""
