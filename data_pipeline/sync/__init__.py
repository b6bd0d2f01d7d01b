"""Copies sources between stores: finds a source's files, copies missing files, verifies them."""
