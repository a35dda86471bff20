"""Make the tiny model of the examples and tests; takes about a minute on one core.

    python scripts/make_tiny_model.py models/tiny_arithmetic
    python scripts/make_tiny_model.py models/tiny_chain chain
    python scripts/make_tiny_model.py models/tiny_calculator calculator

``scripts/tiny_model.py`` describes the model and its training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Make the model; print that it takes a while, then its success rate on held-out problems.

    Args:
        arguments: The folder to write to (``models/tiny_arithmetic``), and the task: ``arithmetic`` (default),
            ``chain`` or ``calculator``.

    Returns:
        Exit status: 0 done, 2 wrong arguments.
    """
    folder, task, *others = [*arguments, *("models/tiny_arithmetic", "arithmetic")[len(arguments) :]]
    if others or folder.startswith("-") or task not in ("arithmetic", "chain", "calculator"):
        sys.stderr.write("usage: make_tiny_model.py [FOLDER [arithmetic|chain|calculator]]\n")
        return 2
    sys.stdout.write(f"Fitting a tiny model for {task}, about a minute on one core\n")
    sys.stdout.flush()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tiny_model import make_tiny_model  # noqa: PLC0415  # torch is slow to load

    rate = make_tiny_model(folder, task=task)
    sys.stdout.write(f"{folder}: {100 * rate:.1f} % of held-out problems answered right at temperature 1\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
