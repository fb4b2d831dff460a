"""Emulated services on loopback, for tests of programs that use jaxres and for `jaxres chaos`.

`gcs` is Cloud Storage; it needs the extra `gcs`. Nothing that trains imports this package.
"""
