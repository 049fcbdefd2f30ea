"""Job records: in Redis while a job is live, and in the job's own folder for good.

record, step_record, lua   fields, and the scripts that change them      store, records            operations on them
folder, history_mark       the same on disk; `restore` refills Redis     fates                     the end of every group
deaths, follower           for processes that serve jobs                 retention                 removal of ended jobs
versions                   what a job was trained with
"""
