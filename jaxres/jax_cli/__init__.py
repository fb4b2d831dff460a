"""Commands that compute with JAX: doctor, evaluate, replay, sample."""
