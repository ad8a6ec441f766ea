"""gRPC: the gateway's second listener. ``v1`` are the stubs that `scripts/protos` makes from ``proto/rayqueue/v1``."""
