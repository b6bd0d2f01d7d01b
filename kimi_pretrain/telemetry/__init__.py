"""Telemetry: phase times and memory, useful FLOPs, metrics lines and the run folder."""
