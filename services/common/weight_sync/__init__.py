"""Passing policy versions on: the stage that their files lie in, and the gRPC server that announces and sends them."""
