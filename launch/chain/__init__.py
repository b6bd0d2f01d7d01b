"""A chain: the stages of a pre-training in one file, each a run that goes on from others."""
