"""From metadata alone to the rows of every step: order, blend, sizes, packing."""
