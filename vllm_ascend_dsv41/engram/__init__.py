"""Engram: hashing of n-grams; storage, loading and look-up of the tables."""

from .acl import Acl, AclError
from .hashing import NgramHash
from .options import EngramOptionError, EngramOptions
from .peers import PeerError, Peers
from .prefetch import Pending, Prefetcher
from .sharding import EngramShardError, TableShard, check_columns
from .storage import Table
from .tables import EngramTables, Place

__all__ = [
    "Acl",
    "AclError",
    "EngramOptionError",
    "EngramOptions",
    "EngramShardError",
    "EngramTables",
    "NgramHash",
    "PeerError",
    "Peers",
    "Pending",
    "Place",
    "Prefetcher",
    "Table",
    "TableShard",
    "check_columns",
]
