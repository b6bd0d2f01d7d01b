"""Random image augmentation that keeps boxes, points and polygons aligned."""
