"""The HTML report of a run: pure functions from its data to one page, no file access."""
