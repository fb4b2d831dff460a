"""`jaxres chaos`: faults injected into short runs of a config, from outside; no jax."""
