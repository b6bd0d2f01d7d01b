"""Worker pool: runs jobs ahead of their consumer in processes or threads, ordered and bounded."""
