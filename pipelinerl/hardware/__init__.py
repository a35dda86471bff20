"""What a GPU and a model make of a decode step, a prefill, a training step: catalogue, coefficients, formulas."""
