"""Fewer bytes for tensors that travel: pure codecs, which know no model, rank or link."""

from .codec import Codec
from .feedback import ErrorFeedback
from .float8 import GroupedFloat8
from .integers import GroupedIntegers
from .top_k import TopK

__all__ = ["Codec", "ErrorFeedback", "GroupedFloat8", "GroupedIntegers", "TopK"]
