"""`launch sky`: a managed job of SkyPilot."""
