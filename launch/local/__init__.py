"""Starts and stops the processes of a training on one machine, and contains their entry point."""
