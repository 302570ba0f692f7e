"""Fewer bytes for tensors that travel: pure codecs, which know no model, rank or link."""

from .codec import Codec

__all__ = ["Codec"]
