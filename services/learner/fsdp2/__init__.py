"""FSDP2 back end of one rank: transformers' own models, sharded by torch's fully_shard.

backend           models of all roles; optimizer: their steps
model attention   transformers' model around our rows; sharding: this rank's part of it
state             this rank's part on disk, read in any number of ranks
"""
