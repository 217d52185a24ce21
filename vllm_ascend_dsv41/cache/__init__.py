"""Key-value caches: what vLLM allocates for each layer, and where the rows of a step lie."""

from .layers import CompressedCache, IndexKeyCache, OpenGroupCache, PagedCache, WindowCache
from .metadata import RowMetadata

__all__ = ["CompressedCache", "IndexKeyCache", "OpenGroupCache", "PagedCache", "RowMetadata", "WindowCache"]
