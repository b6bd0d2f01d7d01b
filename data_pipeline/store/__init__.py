"""Objects by key, in S3, a folder or memory, with the failures of networks handled."""
