"""SigLIP's objective for packed images: pooling head, text tower, sigmoid loss of all pairs."""
