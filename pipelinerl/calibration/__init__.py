"""From measured times to the coefficients of the hardware model."""
