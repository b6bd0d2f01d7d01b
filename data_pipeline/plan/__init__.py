"""Plans the rows of every step from metadata only: order, blend, sizes, packing."""
