"""torch's FSDP2, with expert parallelism."""
