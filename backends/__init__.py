"""The real world: empty so far. It will carry out the same scheduler's commands on real engines and trainers."""
