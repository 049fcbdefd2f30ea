"""Pool of verifier processes: checks go in, verdicts come out, and none holds up the others."""
