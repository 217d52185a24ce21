"""Engram: hashing of n-grams, storage of the tables, loading."""

from .hashing import NgramHash
from .loader import load_table
from .storage import HostTable, TableShard

__all__ = ["HostTable", "NgramHash", "TableShard", "load_table"]
