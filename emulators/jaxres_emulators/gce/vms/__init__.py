"""The VMs of the emulated Compute Engine: their life cycle, their processes, their capacity."""
