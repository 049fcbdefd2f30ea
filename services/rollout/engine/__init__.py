"""Engine: vLLM in processes of its own, started, updated, monitored and ended.

engine     one vLLM engine                 process     vLLM's arguments, start and end
update     new weights for all requests    verify      comparison of installed and published weights
health     hangs and slow starts           prompts     tokenizer and template, in a child process
types      data types for the other folders
"""
