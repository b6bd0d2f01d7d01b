"""Deletion requests: overwriting samples at rest, and which runs trained on them."""
