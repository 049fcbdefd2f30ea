"""Weights of the policy: the versions that are kept, the gRPC server that serves them, the publisher that makes them."""
