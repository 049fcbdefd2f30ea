"""Loops of a job's head; each says what it consumes, waits for and produces.

issue ─► servers ─► collect ─► train ─► checkpoint            recover   before them all
monitor   deadlines, requests of people, stalls               state     what they share
"""
