"""jaxres: a JAX/Flax trainer whose reason to exist is resilience.

Importing this package imports neither jax nor any part of jaxres.
"""

__version__ = "0.1.0.dev0"
