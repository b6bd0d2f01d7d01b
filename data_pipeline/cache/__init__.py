"""Objects kept on the node, in memory and on disk, shared by its processes."""
