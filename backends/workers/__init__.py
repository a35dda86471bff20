"""Processes that hold user code: rewards and environments, on this machine or on others."""
