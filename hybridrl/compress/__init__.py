"""Fewer bytes for tensors that travel: pure codecs, which know no model, rank or link."""

from hybridrl.compress.codec import Codec
from hybridrl.compress.feedback import ErrorFeedback
from hybridrl.compress.float8 import GroupedFloat8
from hybridrl.compress.grouped_integers import GroupedIntegers
from hybridrl.compress.top_k import TopK

__all__ = ["Codec", "ErrorFeedback", "GroupedFloat8", "GroupedIntegers", "TopK"]
