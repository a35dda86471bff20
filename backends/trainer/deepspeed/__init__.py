"""DeepSpeed: the only modules that import it."""
