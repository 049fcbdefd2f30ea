"""Storage of a job: what must survive the process.

journal (+ journal_key)  batches and fates, before they count      checkpoints   with manifests
lineage                  which history is true                     lock          one writer
job_store                the job's record, healed when Redis loses it     offline   what the folder says without a head
"""
