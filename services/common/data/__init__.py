"""Data: where tasks come from, and in which order.

source      opens files and procedural sources       record     a task as data has it
files, jsonl, parquet, rows, procedural   the kinds  bounds     of what is read
order       the task of each draw                    trial      of a source, in a child
"""
