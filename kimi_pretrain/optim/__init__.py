"""MuonClip: which tensor goes where, the update itself, its owners among ranks, and QK-Clip.

Read in this order: newton_schulz, batched (many matrices at once), groups (rules and parameter
groups), muon (the plain reference), owners (who updates what), distributed (the same update, each
tensor computed by one owner; reduce brings gradients to it, send takes weights from it), qk_clip.
config and recipes hold the numbers, schedule makes a learning rate of them; division, table and
summary are what a dry run shows.
"""
