"""Preparation of data: rows as people have them become parquet files of tasks (`millrace data prepare`).

run        raw ──► workers ──► convert ──► duplicates, split ──► output      settings   keys, as MindSpeed-RL names them
raw        rows of the input, in chunks                                      handlers, conversations, prompt_types   tables
convert    a chunk's rows as tasks, counted in tokens                        duplicates, output, summary
"""
