"""Ranks, sequence shards, shared errors, rendezvous: importing it starts nothing."""
