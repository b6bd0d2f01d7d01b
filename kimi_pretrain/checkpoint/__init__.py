"""Checkpoints of full tensors, keyed by layout-independent names and committed by a manifest.

Each step has one folder, in a folder that all ranks see or in an object store:

    rank_00003_000.safetensors   full tensors that rank 3 wrote
    index.json                   tensor -> file
    manifest.json                the run's state other than tensors, and the SHA-256 of every file

One of the ranks that hold a tensor writes it. A name means the same full matrix in every layout, so
a checkpoint of PP2 x DP2 loads into one process, and vice versa. The manifest is written last: a
checkpoint is complete once it exists. Nothing in a checkpoint is executable.

    manifest, retention, sharding, ownership    pure functions: file contents, retention, writers
    file_access, storage_read, find, load       reading
    collective_read                             reading replicated tensors once
    scheduler, saver, staging, writer_client    saving, on each rank
    writer_process, storage_write, disk_write   writing, in a separate process per rank

This file imports nothing, because the writer process must not load torch.
"""
