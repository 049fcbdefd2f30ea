"""Sandbox: child processes that may be killed at any moment. A job's contents are loaded and run in them, never in a service itself.

limits      of time, memory and log lines, and how a child applies them
forkserver  the process that imports what children need once, and forks children that start warm
processes   the parent's side of it: start, fork, kill
messages    between parent and child, as MessagePack over a socket
server      the child's side: makes one object and serves requests to it
pool        the parent's side: `Sandbox`, whose `Child`ren serve requests within their limits
"""
