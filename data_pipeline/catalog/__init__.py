"""Catalogue of sources: their versions, states, audit log, and the runs that used them."""
