"""The simulator: a discrete-event cluster (SimPy) that executes the scheduler's commands."""
