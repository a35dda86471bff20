"""The trainer: DeepSpeed on Ray actors."""
