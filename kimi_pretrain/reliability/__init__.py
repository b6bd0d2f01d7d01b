"""Keeps long runs alive: preflight checks, anomaly guard, watchdog, run locks, run history."""
