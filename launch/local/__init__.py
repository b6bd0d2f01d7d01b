"""Starts and ends the processes of a training on one machine, and what each of them runs."""
