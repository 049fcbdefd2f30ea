"""Groups: from a draw of the data to a batch of sequences.

data, sources    tasks, made in a child process    tasks       requests to the rollout servers
ledger           every ordinal and its one fate    buffer      groups that have arrived, choice of a step's groups
off_policy       slots and ages                    validate    groups that the ranks cannot train
batch, sequence  input of the ranks                evaluation, failures
"""
