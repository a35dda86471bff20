"""Run folders in, numbers and figures out.

``analysis.read`` reads, ``analysis.figures`` draws, ``analysis.plot`` writes the files. ``import analysis``
and ``analysis.read`` are light: matplotlib is loaded by ``analysis.figures`` only.
"""
