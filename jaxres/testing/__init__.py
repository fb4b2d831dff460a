"""Emulated services on loopback, for tests of programs that use jaxres and for `jaxres chaos`.

`gcs` is Cloud Storage; it needs the extra `gcs`. `gce` is Compute Engine, whose VMs are processes,
and `metadata` the metadata server of a VM. Nothing that trains imports this package.
"""
