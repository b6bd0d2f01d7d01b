"""Crude data to sources."""
