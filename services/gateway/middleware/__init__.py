"""Middleware: host, token, places, seats and bodies, in the order that `app` gives."""
