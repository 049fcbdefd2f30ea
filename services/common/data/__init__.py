"""Data: sources of tasks, and the order of the tasks.

source      opens files and procedural sources       record     a task as sources give it
files, jsonl, parquet, rows, procedural   the kinds  bounds     of what is read
order       the task of each draw                    trial      of a source, in a child
"""
