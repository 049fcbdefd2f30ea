"""Streams: groups on their way between services, at least once, in Redis Streams.

types, codec   what travels, as MessagePack         stream, lua    adding, bounds, depths
limits         bytes and values that an entry of a job may have, by its spec
sample_record  a judged group as people read it
consumer       own pending entries, then those of the dead, then new ones; `dead_letters` for what cannot be used
"""
