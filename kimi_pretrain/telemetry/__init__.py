"""Seconds and memory of a step's phases, useful FLOPs, the line of metrics, the run folder."""
