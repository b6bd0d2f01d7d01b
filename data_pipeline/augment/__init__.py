"""What chance does to pictures, and where that moves boxes, points and polygons."""
