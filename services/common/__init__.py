"""What several services need. Imports no service, no torch, no engine.

spec, data, models, checkpoints   what a job brings             config    settings, paths, names
redis, streams, jobs, weights     what services share           service   what each process is made of
sandbox                           children that may be killed   errors, durable, differences
"""
