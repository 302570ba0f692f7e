"""Codecs that shrink tensors on the wire: pure functions of values that know no model, rank or
link."""
