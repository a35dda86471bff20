"""A small policy that learns inside the simulation. The only part of ``sim`` that needs torch (``tasks`` does not)."""
