"""Whether sources are sound, and what they hold."""
