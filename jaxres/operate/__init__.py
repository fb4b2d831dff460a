"""Tools for operators, which training never imports."""
