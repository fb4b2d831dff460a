"""`jaxres checkpoints`: commands on the steps of a run."""
