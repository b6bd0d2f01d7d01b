"""Ranks, sequence shards, shared errors and rendezvous; importing it starts nothing."""
