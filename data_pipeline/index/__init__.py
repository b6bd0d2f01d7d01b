"""On-disk format of a source: shards, index columns and manifest."""
