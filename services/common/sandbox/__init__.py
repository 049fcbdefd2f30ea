"""Child processes that may be killed at any moment: what a job brings is loaded and run in them, never in a service itself.

limits      of time and memory, and how a child takes them on
output      of a child: log lines up to a bound, nothing else
forkserver  the process that has imported what is needed once, and forks children that are warm at birth
processes   the parent's side of it: start, fork, kill
messages    what parent and child say to each other, as MessagePack over a socket
server      the child's side: makes one object and answers requests to it
pool        the parent's side: `Sandbox`, whose `Child`ren answer requests within their limits
"""
