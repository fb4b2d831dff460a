"""The training computation: state, step, optimizer, mesh and guards, without files or hosts."""
