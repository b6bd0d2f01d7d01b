"""Migration steps of the catalogue's schema, run in order by `catalog.migrate`."""
