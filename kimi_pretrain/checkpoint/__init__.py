"""Checkpoints: every tensor under its layout-independent name, committed by a manifest.

One folder a step, in a folder that all ranks see or in an object store:

    rank_00003_000.safetensors   whole tensors that rank 3 wrote
    index.json                   which tensor is in which file
    manifest.json                what the run remembers besides, and the SHA-256 of every file

Each tensor is written by one of the ranks that hold it. Because a name means the same whole matrix
in every layout, a checkpoint of PP2 x DP2 loads into one process and the other way round. The
manifest comes last: a checkpoint is complete when it is there. Nothing in it is executable.

    manifest, retention, tensor_file, writers    pure: what stands in files, what stays, who writes
    files, place, find, load                     reading
    saver, hand, writer, sink                    writing, in a process of its own beside each rank

Nothing is imported here: the writer process must not load torch.
"""
