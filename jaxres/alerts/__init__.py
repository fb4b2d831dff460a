"""Tells people of incidents through webhooks; never imports jax, disturbs nothing that trains."""
