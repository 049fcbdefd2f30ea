"""Programs: runs code that a model wrote, in a process that sees next to nothing and may be killed.

sandbox    the parent's side: finds a program in a text, starts a runner, and reads what became of each run
runner     the fresh interpreter that isolates itself and forks a process for each run
isolation  namespaces, a root of its own, limits, capabilities
"""
