"""Middleware: host, timeout, token, request limit and bodies, in the order of `app`; and the limit of event streams."""
