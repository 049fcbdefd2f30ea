"""Commands of `millrace`: each parses its options, asks the gateway or the machine, and hands the answer to `views`."""
