"""Run folders in, numbers and figures out.

``read`` reads the typed reports, ``metrics`` the log of a run. ``figures``, ``learning``, ``bands``, ``throughput``,
``planning`` and ``validation`` draw, in the look of ``style``. ``plot`` writes the figures of a folder. ``drift_fit``
fits a drift model. ``import analysis`` and ``analysis.read`` are light: only the modules that draw load matplotlib.
"""
