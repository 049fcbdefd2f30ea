"""Events of jobs: one poll of all followed jobs, and a stream for each reader."""
