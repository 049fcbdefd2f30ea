"""Weights of the policy: the store of published versions, the gRPC server that sends them, the publisher that fills the store."""
