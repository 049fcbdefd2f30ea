"""Rollout service: one vLLM engine, which samples for jobs and answers chats.

service    attaches to jobs           session    one job: weights, then tasks      engine   vLLM and its tokenizer
sampling   tasks to rollouts          weights    versions from the learner         chat     answers, behind training
"""
