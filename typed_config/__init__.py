"""The base of every section of the configuration, and what the sections say of their own keys.

`section` is the base class, `reference` lists keys with types, defaults, units and places. Knows no
section: each lies beside the code that reads it.
"""
