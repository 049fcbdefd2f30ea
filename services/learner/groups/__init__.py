"""Groups: from a draw of the data to a batch of sequences.

data, sources    tasks, made in a child process    buffer      groups that have arrived, choice of a step's groups
ledger           every ordinal and its one fate
off_policy       slots and ages                    validate    groups that the ranks cannot train
batch, sequence  input of the ranks                evaluation, failures, occupancy
"""
