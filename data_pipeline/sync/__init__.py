"""Copies sources between stores: finds the files of a source, copies the missing ones, verifies
them.
"""
