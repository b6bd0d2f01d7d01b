"""Campaign of real faults against real training jobs; see `__main__`."""
