"""Job spec: the body of `POST /jobs` and the content of a job's YAML file, as one pydantic model.

job       the whole spec, from text and back         document   YAML and JSON within bounds
learner, algorithm, rollout, data, reward, scorers, verifiers   its sections     base   the base class of sections
"""
