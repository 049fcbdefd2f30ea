"""Service: the parts that every process is made of.

lifecycle  drain, loops, signals           watchdog   detects hanging processes and event loops
health     /healthz, /readyz, /metrics     heartbeat  the list of workers
entry      settings, logs, exit codes      preflight  requirements checked at the start
host       memory limit, packages
"""
