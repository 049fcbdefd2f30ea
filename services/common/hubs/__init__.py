"""Hubs: models and data files fetched from Hugging Face and ModelScope, by their own libraries, in a child that may be killed.

repository    what a hub says of a repository, and what every hub can do
hugging_face  the Hugging Face Hub, by huggingface_hub
model_scope   ModelScope, by modelscope_hub
choice        the files that are fetched, and the repositories that are refused
work          the child's work: survey a reference, fetch it
fetcher       the parent's side: one fetch for each reference, watched, tried again, cancelled
"""
