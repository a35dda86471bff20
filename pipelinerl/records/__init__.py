"""Records of a run, simulated or real: ledger, rollout buffer, trace, reports, run folder."""
