"""Data in a bucket: read where they are, or copied to this machine."""
