"""Chains: a file that lists the stages of a pre-training, which are runs that use earlier runs."""
