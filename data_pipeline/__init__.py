"""From an object store to the rows and media of a training step; knows nothing of models.

Storage half, in import order: objects and store (bytes by key), shards (tar files), text
(tokenizer), index (what a source holds), decode (bytes to patches), ingest (samples to a source).
Planning half: order, blend, pack, config, layout, plan, collate, loader.
The format on disk is described in docs/data_format.md. numpy only, no torch.
"""
