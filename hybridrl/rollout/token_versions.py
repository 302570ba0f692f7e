"""TokenVersions: which version of the policy makes each token of the samples under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


class TokenVersions:
    """Follows requests while the engine's weights may change between two of their tokens.

    Args:
        version: Of the weights that the engine has.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self._begins: dict[int, list[tuple[int, int]]] = {}  # by key: from which token on

    def begin(self, keys: Iterable[int]) -> None:
        """These samples begin."""
        for key in keys:
            self._begins[key] = [(0, self.version)]

    def change(self, version: int, progress: Callable[[], Mapping[int, int]]) -> None:
        """The engine has this version now.

        Args:
            progress: Says how many tokens each sample under way has, by key.
        """
        if version == self.version:
            return
        self.version, tokens = version, progress()
        for key, begins in self._begins.items():
            begins.append((tokens.get(key, 0), version))

    def end(self, key: int, length: int) -> list[int]:
        """The version of each token of a sample that has so many, and is over."""
        begins = self._begins.pop(key)
        ends = [start for start, _ in begins[1:]] + [length]
        return [
            version
            for (start, version), end in zip(begins, ends, strict=True)
            for _ in range(start, min(end, length))
        ]

    def drop(self, keys: Iterable[int]) -> None:
        """These samples are not wanted any more."""
        for key in keys:
            self._begins.pop(key, None)
