"""Peers: TRL's plain `GRPOTrainer` and this stack on the same jobs, in one run.

run     rounds, and the document            table   the results as Markdown
ours    the stack's side                    peer    TRL's side: `trl_loop`, in an environment of its own
limits  what each part could do alone       shapes  the jobs, and the ways to run them
"""
