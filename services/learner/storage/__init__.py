"""Storage of a job: everything that survives the process.

journal (+ journal_key)  batches and fates, before they count      checkpoints   with manifests
lineage                  the history that is true                  lock          one writer
job_store                the job's record, restored to Redis       offline       the folder's account without a head
"""
