"""The processes of an attempt on this host."""
