"""Checks the integrity of sources and computes their statistics."""
