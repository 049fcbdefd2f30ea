"""Groups: from a draw of the data to a batch of sequences.

data, sources   tasks, made in a child            tasks       what is asked of the servers
ledger          every ordinal and its one fate    buffer      what has arrived, and what a step takes of it
off_policy      slots and ages                    validate    what ranks cannot train
batch, sequence what ranks are given              evaluation, failures
"""
