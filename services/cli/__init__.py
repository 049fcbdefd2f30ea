"""The command line `millrace`, and the stack that it keeps alive on one machine.

commands   one module for each group of commands        views    what they print
stack      processes of `millrace up`: plan, supervisor  checks   what `millrace doctor` looks at
client     of the gateway's HTTP API                     up       starts and ends the stack
"""
