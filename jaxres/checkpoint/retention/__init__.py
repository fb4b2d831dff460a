"""Which steps are kept, and how often one is saved."""
