"""What `millrace doctor` looks at, one noun a module; each check answers with findings and never raises."""
