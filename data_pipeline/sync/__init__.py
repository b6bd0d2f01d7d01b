"""Copies of sources in other places: what belongs to one, what is missing there, and its bytes."""
