"""Stack of one machine: which processes it has, and how they are kept alive.

plan        the table of processes, with their environments, ports and cores
supervisor  starts the table, restarts what dies, drains it in order
children    process trees; `health` asks each whether it is ready and alive
state       what runs, in `<home>/up.json`; `runtime` and `segments`: what it has outside of the home
redis       the embedded server
"""
