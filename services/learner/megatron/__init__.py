"""Megatron-core back end of one rank.

backend                    models of all roles, through Megatron's schedule; optimizer: their steps
model bridges attention    a rank's part of a model
parallel platform          Megatron's groups, and what it needs of the machine
state role weights         this rank's part on disk
saved parts resharding     a checkpoint of all ranks, read in another layout
"""
