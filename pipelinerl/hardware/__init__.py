"""The times of decode, prefill and training that follow from a GPU and a model: catalogue, coefficients, formulas."""
