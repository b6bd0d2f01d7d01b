"""Checkpoints: every tensor under its layout-independent name, committed by a manifest.

One folder a step, in a folder that all ranks see or in an object store:

    rank_00003_000.safetensors   whole tensors that rank 3 wrote
    index.json                   which tensor is in which file
    manifest.json                the run's state besides tensors, and the SHA-256 of every file

Each tensor is written by one of the ranks that hold it. Because a name means the same whole matrix
in every layout, a checkpoint of PP2 x DP2 loads into one process and the other way round. The
manifest comes last: a checkpoint is complete when it is there. Nothing in it is executable.

    manifest, retention, sharding, ownership    pure: file contents, what is kept, who writes what
    file_access, storage_read, find, load       reading; collective_read: once for all who hold it
    scheduler, saver, staging, writer_client    saving, on the side of each rank
    writer_process, storage_write, disk_write   writing, in a process of its own beside each rank

Nothing is imported here: the writer process must not load torch.
"""
