"""What `jaxres doctor` and the production checklist check."""
