"""Strict JAX on eight virtual CPU devices; the process-level vocabulary lives in tests/promises."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
