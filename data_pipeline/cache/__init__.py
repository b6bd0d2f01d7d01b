"""Node cache: keeps objects in memory and on disk, shared by the processes of a node."""
