"""Run folders in, numbers and figures out.

``analysis.runs`` reads, ``analysis.figures`` draws, ``analysis.report`` writes the files. ``import analysis``
and ``analysis.runs`` are light: matplotlib is loaded by ``analysis.figures`` only.
"""
