"""``train --check``: the first command on the machines of a run."""
