"""Reward models: sequence classifiers with one output, each in a process of its own that may be killed. torch is imported there only.

reward_model  one reward model of a job: loads, batches, asks again, gives verdicts
classifier    its process: tokenizer and model      platform  the device that it computes on      padding  rows of equal length
"""
