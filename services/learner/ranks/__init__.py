"""Ranks of a job, from their head's side: launch, commands, monitoring.

launch     torchelastic's arguments, machines              deaths      why ranks died
client     commands to all ranks, from rank 0              commands    their types and encoding
loop       a rank's own loop                               heartbeat   ranks that hang
"""
