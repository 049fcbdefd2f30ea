"""Trackers: a job's history, sent to the programs that people compare runs with.

supervisor        in the gateway: one task for each job and tracker ─► a child process, killed when a batch takes too long
follower          in the child: history from its recorded position ─► a sink ─► the next position
history, names    points of a history and its position; the names of their figures
sink              what a tracker must do                 tensorboard, mlflow, wandb, swanlab, files    those that do
available         which of them are configured here
"""
