"""Code that several services share. Imports no service, no torch, no engine.

spec, data, models, checkpoints   contents of a job             config    settings, paths, names
redis, streams, jobs, weights     stores and transports         service   parts of every process
sandbox, programs                 killable child processes      errors, durable, batches, differences
"""
