"""Pool of verifier processes: takes checks, returns verdicts, and isolates each check from the others."""
