"""What keeps a long run alive: preflight checks, anomaly guard, watchdog, locks, history."""
