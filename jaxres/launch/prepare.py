"""`launch gce init`: placeholder."""
