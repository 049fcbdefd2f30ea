"""Conversion of weights: a job's checkpoint to a Hugging Face directory, and back, on the CPU, in a process that may be killed.

request        what is converted, and what came of it
run            the process, its unfinished folder, and the rename at the end
worker         the process's entry: hugging_face (to-hf), megatron (to-megatron), skeleton (names and splits without weights)
report         what a checkpoint or a model directory holds; without torch
"""
