"""Closed forms: the paper's analytic model, and the steady state that a plan is screened with."""
