"""What ``train --check`` found, as a type: the content of check.json."""

from __future__ import annotations

from enum import StrEnum

from pipelinerl.util.strict_model import Report


class Finding(StrEnum):
    """Meaning of a measurement."""

    OK = "ok"
    """As it should be, or there is nothing to compare it with."""
    SLOW = "slow"
    """It works, and is slower than the pessimistic level of the hardware catalogue."""
    WRONG = "wrong"
    """A run would fail or learn nothing."""
    UNCHECKED = "not checked"


class CheckRow(Report):
    """One measurement."""

    what: str
    """Name of the measurement."""
    measured: str
    """Value with its unit; where nothing could be measured, why."""
    expected: str = ""
    """Expected value and its source. Empty: none."""
    finding: Finding = Finding.OK
    """Meaning."""
    advice: str = ""
    """What to do. Empty: nothing."""


class CheckReport(Report):
    """All measurements, in the order in which they were made."""

    rows: list[CheckRow]
    """The measurements."""

    @property
    def wrong(self) -> bool:
        """Whether any row is *wrong*."""
        return any(row.finding is Finding.WRONG for row in self.rows)


def unchecked(what: str, why: str, advice: str = "") -> CheckRow:
    """Return a row of the check for something not measured."""
    return CheckRow(what=what, measured=why, finding=Finding.UNCHECKED, advice=advice)


def compared(what: str, measured: str, expected: str, *, slow: bool, advice: str) -> CheckRow:
    """Return a row of the check with the finding *slow*, and the advice, or *ok*."""
    finding = Finding.SLOW if slow else Finding.OK
    return CheckRow(what=what, measured=measured, expected=expected, finding=finding, advice=advice if slow else "")


def wrong(what: str, measured: str, advice: str) -> CheckRow:
    """Return a row of the check with the finding *wrong*."""
    return CheckRow(what=what, measured=measured, finding=Finding.WRONG, advice=advice)
