"""`launch k8s`: a JobSet or an indexed Job."""
