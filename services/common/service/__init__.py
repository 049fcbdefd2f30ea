"""Service: what every process is made of.

lifecycle  drain, loops, signals           watchdog   ends a process that stands still
health     /healthz, /readyz, /metrics     heartbeat  the list of workers
processes  trees and their vital signs     preflight  what must be there at the start
"""
