"""How weights cross from the trainer to the engines."""
