"""Stable data-set indices, for map-style data and for tar shards, and a loader that looks one batch ahead."""

from compopt.data.indexed import Indexed, key_index
from compopt.data.keys import KeyIndex, UidIndex
from compopt.data.prefetch_loader import PrefetchLoader
from compopt.data.shard_batches import ShardBatches
from compopt.data.shard_list import shard_list
from compopt.data.shards import ShardIndex
from compopt.data.streams import SampleIndex, indexed_reader

__all__ = [
    "Indexed",
    "KeyIndex",
    "PrefetchLoader",
    "SampleIndex",
    "ShardBatches",
    "ShardIndex",
    "UidIndex",
    "indexed_reader",
    "key_index",
    "shard_list",
]
