"""SigLIP's objective for packed images: pooling head, text tower, sigmoid loss over all pairs."""
