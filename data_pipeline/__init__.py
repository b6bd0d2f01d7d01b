"""Data pipeline: turns objects of a store into the rows and media of a step; independent of models.

store, cache            object store clients, and the node's cache
index                   index of a source: shards, columns, manifest
text, augment, config   tokenizer, random augmentation, configuration
plan                    plans the rows of every step from metadata only
decode, collate, fetch  turn bytes into patches and rows
workers, loader         prefetch steps and return them in order
ingest, inspect         convert raw data into sources, and check sources
stream                  ordered raw samples for consumers without a model
"""
