"""Python imports this when it starts: it looks for cycles of garbage at every 100,000th object, not at every 700th.

Looking took an eighth of the seconds in which vLLM is imported, and a sixth of those of the simulator's tests.
"""

import gc

gc.set_threshold(100_000)
