"""Deletion requests, holds and garbage collection for samples and sources at rest."""
