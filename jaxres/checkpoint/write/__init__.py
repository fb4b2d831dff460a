"""From arrays on devices to files of a step."""
