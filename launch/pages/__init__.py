"""Self-contained HTML pages that show data: no scripts, no other files, light and dark."""
