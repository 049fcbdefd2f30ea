"""Commands of `millrace`: each parses its options, requests data from the gateway or the machine, and passes it to `views`."""
