"""Weights of the policy: the store of published versions, and the gRPC server that publishes them."""
