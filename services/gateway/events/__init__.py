"""Events of jobs: one look at each followed job, and a stream for each reader."""
