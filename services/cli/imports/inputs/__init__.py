"""Texts that an import reads.

keys    a configuration as dotted keys            hydra   overrides on a command line
script  the call in a shell script                words   the shell's words and variables
"""
