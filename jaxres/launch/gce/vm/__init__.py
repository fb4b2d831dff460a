"""What runs on a VM."""
