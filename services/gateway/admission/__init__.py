"""Admission of a new job: checks of its body, model, data and limits, in child processes that may be killed."""
