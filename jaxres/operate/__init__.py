"""What operators use and training never imports."""
