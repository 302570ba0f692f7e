"""What a reward function returns when its score must not be kept.

A module of its own, so that reward functions that run without torch can import it.
"""

from __future__ import annotations

from typing import Any


class TransientScore(dict[str, Any]):
    """The dictionary that a reward function returns when another call might score the same response
    differently, such as after a timeout: it is not cached."""
