"""Plan and run asynchronous reinforcement learning of language models: one scheduler, two worlds.

``import pipelinerl`` is light: it loads the scheduler and what crosses its border, nothing else.
"""

from pipelinerl.scheduler.base import Scheduler
from pipelinerl.scheduler.kinds import make_scheduler

__all__ = ["Scheduler", "__version__", "make_scheduler"]
__version__ = "0.1.0"
