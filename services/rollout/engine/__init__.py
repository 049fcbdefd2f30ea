"""Engine: vLLM in processes of its own, started, updated, watched and ended.

engine     the one that samples            process     vLLM's arguments, start and end
update     new weights at once for all     verify      that they are the published ones
health     hangs and slow starts           prompts     tokenizer and template, in a child
types      what the other folders see of it
"""
