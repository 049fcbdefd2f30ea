"""Ranks as their head has them: how they are launched, commanded and watched.

launch     torchelastic's arguments, machines              deaths      why ranks died
client     commands to all ranks, from rank 0              commands    what they are
loop       a rank's own loop                               heartbeat   that it moves
"""
