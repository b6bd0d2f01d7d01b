"""What a source holds, on disk: shards, columns, manifest."""
