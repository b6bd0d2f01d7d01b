"""Weights in and out: Hugging Face folders, first weights of a run, looking at checkpoints.

Inside, every tensor has the name that Kimi K2.5's checkpoint gives it (`shapes.model_shapes`).
Nothing here unpickles: what is read is safetensors and JSON.
"""
