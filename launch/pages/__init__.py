"""Self-contained HTML pages that show data, without scripts or other files, in light and dark."""
