"""Chains: several pre-training stages in one file; each is a run that can use earlier stages."""
