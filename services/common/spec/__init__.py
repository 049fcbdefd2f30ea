"""The job spec: what a person sends to `POST /jobs` and writes in a YAML file. The same model serves both.

job       the whole spec, from text and back         document   YAML and JSON within bounds
learner, algorithm, rollout, data   its sections     base       what a section is
"""
