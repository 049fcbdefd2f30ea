"""Model directories in Hugging Face format, read without torch.

directory     location, safety and shape             config   settings of config.json that can be trained
weight_files  headers and values of safetensors      trial    all of it loaded once, in a child process
roles         models beside the actor                classifier  the trial of a reward model
"""
