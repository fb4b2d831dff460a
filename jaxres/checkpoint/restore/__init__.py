"""From the files of a step to arrays on devices."""
