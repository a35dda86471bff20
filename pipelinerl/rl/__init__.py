"""The mathematics of learning: losses, advantages, effective sample size, drift; and tasks with their rewards."""
