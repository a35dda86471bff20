"""Step times of the machine at hand."""
