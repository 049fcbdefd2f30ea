"""Command line `millrace`, and the stack of processes that it runs on one machine.

commands   one module for each group of commands         views    text output of the commands
stack      processes of `millrace up`: plan, supervisor  checks   checks of `millrace doctor`
connect    gateway of a command, built on `millrace`     up       starts and ends the stack
"""
