"""Checks of `millrace doctor`: each returns findings and never raises."""
