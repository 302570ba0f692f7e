"""Fewer bytes for tensors that travel: pure codecs, which know no model, rank or link."""

from hybridrl.compress.codec import Codec
from hybridrl.compress.grouped_integers import GroupedIntegers

__all__ = ["Codec", "GroupedIntegers"]
