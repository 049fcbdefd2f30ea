"""Examples that people run."""
