"""Raw samples in an exact order, without packing or a model."""
