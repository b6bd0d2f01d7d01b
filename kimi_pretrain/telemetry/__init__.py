"""What a step tells of itself: seconds and memory of its phases, useful FLOPs, one line."""
