"""Base class of all configuration sections, and the list of their keys.

`section` has the base class; `reference` lists keys with types, defaults, units and readers. This
package knows no section: each section is defined next to the code that reads it.
"""
