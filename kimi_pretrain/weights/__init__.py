"""Loads, inspects and exports weights: Hugging Face folders, initial weights, checkpoints.

Internally every tensor has its name in Kimi K2.5's checkpoint (`shapes.model_shapes`). Nothing here
unpickles: it reads only safetensors and JSON.
"""
