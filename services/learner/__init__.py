"""The learner: an agent that takes jobs, and the ranks that train them.

agent       takes a job, starts ranks, notices their ends      controller   rank 0's head: the job's loops, wired
loops       issue, collect, train, monitor, checkpoint, recover               rank   one process of Megatron
groups      from tasks to batches         ranks   how the head commands them  megatron, algorithms   the training
storage     journal, checkpoints, lineage                       weights       versions, served to rollout servers
audit, replay   proofs from a job's folder
"""
