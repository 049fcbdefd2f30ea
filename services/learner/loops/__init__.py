"""Loops of a job's head; each docstring lists what the loop consumes, waits for and produces.

issue ─► servers ─► collect ─► train (step) ─► checkpoint     recover   runs before all of them
monitor   deadlines, requests of users, stalls, server_deaths state     shared by the loops
"""
