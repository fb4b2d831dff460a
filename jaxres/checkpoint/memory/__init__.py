"""The memory tier: states in this host's memory and in a neighbour's."""
