"""Learner: the agent of a node, which takes jobs, and the ranks that train them.

agent       takes a job, starts its ranks, detects their deaths      controller   rank 0's head: wires the job's loops
loops       issue, collect, train, monitor, checkpoint, recover      rank         one Megatron process
groups      from tasks to batches     ranks   commands of the head   megatron, algorithms   the training itself
storage     journal, checkpoints, lineage                            weights      versions, served to rollout servers
audit, replay   proofs from a job's folder
"""
