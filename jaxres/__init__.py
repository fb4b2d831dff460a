"""jaxres: a trainer for JAX and Flax models that resumes bit for bit after any failure.

Importing this package imports neither jax nor any part of jaxres.
"""

__version__ = "0.1.0.dev0"
