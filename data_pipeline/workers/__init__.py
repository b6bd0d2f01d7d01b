"""Jobs done ahead by processes or threads, in order and within limits."""
