"""`launch gce`: VMs of Compute Engine for a run, replaced until it is complete."""
