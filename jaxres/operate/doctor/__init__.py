"""Checks of `jaxres doctor` and of the production checklist."""
