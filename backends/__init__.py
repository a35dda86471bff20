"""The real backend: the scheduler's commands carried out on engines and a trainer. Begin with ``interface.py``."""
