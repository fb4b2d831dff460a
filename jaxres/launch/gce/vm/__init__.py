"""Code and scripts of the VMs."""
