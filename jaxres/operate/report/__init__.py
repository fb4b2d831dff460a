"""The HTML report of a run: pure functions from what was read to one page, no file access."""
