"""Requests to Google."""
