"""Jobs as records: in Redis while they live, in a folder for good.

record, lua   fields, and the scripts that change them        store, saved, history   what is done with them
folder        the same on disk; `restore` puts it back        fates    what became of each group
deaths        of processes that served a job                  retention, deleted   how ended jobs go
"""
