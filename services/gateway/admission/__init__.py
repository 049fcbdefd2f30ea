"""Admission of a new job: body, model, data and limits, checked in children that may be killed."""
