"""A trainer in torch: the policy model, its packed batches and loss step, and the weights it publishes."""
