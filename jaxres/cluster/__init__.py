"""The hosts of one job: detection, rendezvous, messages, JAX coordination service."""
