"""From an object store to the rows and media of a training step; knows nothing of models.

store, cache            objects by key, and their copies on the node
index                   what a source holds: shards, columns, manifest
text, augment, config   tokens; what chance does to pictures; what is asked for
plan                    from metadata alone to the rows of every step
decode, collate, fetch  bytes to patches and rows
workers, loader         steps ahead, in order
ingest, inspect         crude data to sources, and whether they are sound
stream                  raw samples in order, for who wants no model
"""
