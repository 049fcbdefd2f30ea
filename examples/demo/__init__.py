"""The demo: models that train within minutes, and the driver of `make demo`."""
