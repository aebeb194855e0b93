"""Stable data-set indices for map-style data and tar shards, and a loader that prefetches rows one batch ahead."""

from compopt.data.indexed import Indexed, KeyIndex, SampleIndex, UidIndex, key_index
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.data.shards import ShardIndex, indexed_reader, shard_list

__all__ = [
    "Indexed",
    "KeyIndex",
    "PrefetchLoader",
    "SampleIndex",
    "ShardIndex",
    "UidIndex",
    "indexed_reader",
    "key_index",
    "shard_list",
]
