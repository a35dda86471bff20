"""All of Ray: its cluster, the placement of a run on it, and the actors that engines and ranks are."""
