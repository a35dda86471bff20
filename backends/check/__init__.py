"""``train --check``: what a user runs first, on the machines that are to train."""
