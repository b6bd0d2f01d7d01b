"""Ingest: converts raw data into sources."""
