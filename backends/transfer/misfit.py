"""Faults of weights that another transfer of the same weights would have, too; known by their text.

From vLLM's processes, and from the members of a group, comes the text of an error only.
"""

from __future__ import annotations

import re

LACK, UNKNOWN, SHAPE = "lack", "have unknown", "have a wrong shape in"
"""What is wrong with names and shapes, as messages say it."""


def is_misfit(failure: str) -> bool:
    """Return whether a failure is what ``weights_check.check_names`` raised."""
    return re.search(rf" ({LACK}|{UNKNOWN}|{SHAPE}) \d+ of \d+ parameters: ", failure) is not None
