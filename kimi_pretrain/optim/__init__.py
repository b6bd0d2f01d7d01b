"""MuonClip: which tensor goes where, the update itself, its owners among ranks, and QK-Clip.

Read in this order: newton_schulz, groups, muon (the plain reference), distributed (the same update,
each tensor computed by one owner and sent to the rest), qk_clip, schedule.
"""
