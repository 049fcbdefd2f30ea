"""Model directories in Hugging Face format, looked at without torch.

directory     found, safe, and of which shape        config   what of config.json can be trained
weight_files  headers and values of safetensors      trial    all of it loaded once, in a child
"""
