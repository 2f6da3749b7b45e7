"""Evolving Infra: serving infrastructure for LLM agents.

Importing the package loads neither torch nor asyncio; layers are imported by name.
"""

__version__ = "0.1.0"
