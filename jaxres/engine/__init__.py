"""The computation: state, step, optimizer, mesh, guards. No files, no hosts."""
