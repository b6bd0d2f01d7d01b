"""Source stage of a webdataset pipeline: samples in an exact order, without packing or a model."""
