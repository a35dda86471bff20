"""The search for the best way to run on a cluster."""
