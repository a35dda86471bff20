"""Python imports this when it starts: look for cycles of garbage more rarely than Python would, as imports make none.

Without it a third of a process's imports, and a fifth of the simulator's tests, is spent on looking.
"""

import gc

gc.set_threshold(100_000)
