"""The compiled steps and their cache."""
