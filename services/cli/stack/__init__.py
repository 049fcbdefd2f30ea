"""Stack of one machine: its processes, and the supervisor that restarts them.

plan        table of processes, with their environments, ports and cores
supervisor  starts the table, restarts what dies, drains it in order
children    start of a child process; `health` probes whether it is ready and alive
state       running stack, in `<home>/up.json`; `runtime` and `segments`: its directories and shared memory outside the home
redis       embedded server
"""
