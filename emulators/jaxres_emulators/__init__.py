"""Emulated services on loopback, for tests of programs that use jaxres and for `jaxres chaos`.

`gcs` is Cloud Storage, `gce` Compute Engine, whose VMs are processes, `metadata` the metadata
server of a VM, `nvml` NVIDIA's management library and `proxy` a connection that can be cut. This
package imports nothing of jaxres; of jaxres only `jaxres chaos` imports it.
"""
