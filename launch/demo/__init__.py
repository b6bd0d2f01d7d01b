"""Quick start: a real corpus, a real S3 server, one whole training run on a CPU."""
