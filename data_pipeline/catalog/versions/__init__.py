"""The schema of the catalogue, step by step: `catalog.migrate` runs them in their order."""
