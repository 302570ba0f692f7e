"""Codecs that shrink tensors on the wire: pure functions of values that know no model, rank or
link."""

from hybridrl.compress.codec import Codec
from hybridrl.compress.grouped_integers import GroupedIntegerCodec

__all__ = ["Codec", "GroupedIntegerCodec"]
