"""Session: what was sampled for one episode, token by token, however its program asked for it; and
Sessions, those that are open at an endpoint, and who may do what in them."""

from __future__ import annotations

import hmac
import secrets
import threading
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrl.rollout.rollout_engine import EngineOutput, SamplingSettings
from hybridrl.rollout.transcript import TokenTranscript
from hybridrl.serving.request_parsing import EpisodeReport

OWN = "own"
"""The name of a session that a request gets which names none."""
SAMPLE, REPORT, ROWS = "sample", "report", "rows"
"""What a token is for: turns of the model, what an episode was worth, rows to play."""
ANY = "any"
"""In place of a session's name: the token is for all of them."""


class TurnTokens(NamedTuple):
    """The tokens of a recorded turn: its prompt and what was sampled."""

    prompt_ids: list[int]
    token_ids: list[int]


@dataclass
class _SessionBranch:
    """A conversation of a session that was only ever extended."""

    part: str
    transcript: TokenTranscript
    latest: int = 0  # the number of its last turn


@dataclass
class RecordedTurn:
    """A recorded turn, with what is needed to discard it."""

    branch: _SessionBranch
    before: Mapping[str, Any] | None  # of the transcript; None: the branch began with this turn
    length: int
    latest: int
    key: str | None


@dataclass
class AgentSession:
    """The conversations of one episode with the model.

    A turn whose prompt begins with all tokens of a branch extends that branch: what is new of the
    prompt was given, then comes what was sampled. Any other turn begins a branch, with all of its
    prompt as the branch's. So every sampled token is there once, with exactly the tokens before it
    that the engine read, whatever the program did to its messages: edited or compacted them, asked
    for several answers, or had other agents of its own.

    Both the endpoint's thread and the engine's use it.

    Attributes:
        name: In the endpoint's addresses. Programs may add a dot and a name of their own: those are
            parts of the same episode.
        sampling: Of every turn; requests may only shorten it.
        seed: Each request gets another one of it.
        is_trained: Whether what is sampled is learned from. If not, nothing is kept, and requests
            choose how to sample.
        report: What the program said itself; None: nothing so far.
        under_way: Keys of requests that are not answered yet.
        last_reason: Why the turn that was recorded last ended.
        sampled: The number of tokens sampled so far.
    """

    name: str
    sampling: SamplingSettings
    seed: int
    is_trained: bool = True
    report: EpisodeReport | None = None
    under_way: set[int] = field(default_factory=set)
    last_reason: str = "stop"
    sampled: int = 0
    _branches: list[_SessionBranch] = field(default_factory=list)
    _known: dict[str, tuple[TokenTranscript, int, int]] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)  # requests of each part
    _turns: int = 0
    _is_over: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_seed(self, part: str) -> int:
        """Return a seed for the next request of a part, which depends only on the session's seed,
        the part and its request count, so that resumed runs repeat it."""
        self._asked[part] = number = self._asked.get(part, 0) + 1
        own = part.removeprefix(self.name)
        return hash((self.seed, zlib.crc32(own.encode()), number)) % 2**62

    def known(self, key: str) -> TurnTokens | None:
        """Return the turn that was recorded under a key."""
        with self._lock:
            if (found := self._known.get(key)) is None:
                return None
            transcript, start, end = found
            ids = transcript.token_ids
            return TurnTokens(ids[:start], ids[start:end])

    def record(self, part: str, turn: EngineOutput, key: str | None = None) -> RecordedTurn | None:
        """Record a turn that is about to be sent.

        Args:
            part: The session's name as the program gave it.
            key: A name for `known`.

        Returns:
            None if the episode is over, or is not learned from.
        """
        with self._lock:
            if self._is_over or not self.is_trained:
                return None
            branch = self._extended_by(turn.prompt_ids, part)
            before = None
            if branch is None:
                branch = _SessionBranch(part, TokenTranscript(turn.prompt_ids))
                self._branches.append(branch)
            else:
                before = branch.transcript.mark()
                given = turn.prompt_ids[len(branch.transcript.token_ids) :]
                branch.transcript.add_given(given)
            recorded = RecordedTurn(branch, before, 0, branch.latest, key)
            transcript, branch.latest = branch.transcript, self._turns
            transcript.add_sampled(turn, branch.latest)
            self._turns += 1
            self.sampled += len(turn.token_ids)
            recorded.length = len(transcript)
            self.last_reason = turn.finish_reason
            if key is not None:
                start = len(turn.prompt_ids)
                self._known[key] = transcript, start, start + len(turn.token_ids)
            return recorded

    def take_back(self, recorded: RecordedTurn) -> None:
        """Discard a turn that did not reach the program, unless it has been extended."""
        with self._lock:
            branch = recorded.branch
            if self._is_over or len(branch.transcript) != recorded.length:
                return
            if recorded.key is not None:
                self._known.pop(recorded.key, None)
            self.sampled -= branch.transcript.sampled
            if recorded.before is None:
                self._branches.remove(branch)
                return
            branch.transcript.return_to(recorded.before)
            branch.latest = recorded.latest
            self.sampled += branch.transcript.sampled

    def end(self, parts: Collection[str] | None = None) -> list[TokenTranscript]:
        """Finish the episode; nothing is recorded afterwards.

        Args:
            parts: Only what was sampled in these counts; None: all.

        Returns:
            The branches; the one that was extended last comes last. Turns are counted over all of
            them, in the order in which they were answered.
        """
        with self._lock:
            self._is_over = True
            branches = [
                b for b in self._branches if parts is None or _is_selected_part(b.part, parts)
            ]
            branches.sort(key=lambda branch: branch.latest)
            found = [branch.transcript for branch in branches]
            turns = sorted({turn for transcript in found for turn in transcript.turns})
            numbers = {turn: number for number, turn in enumerate(turns)}
            for transcript in found:
                transcript.turns = [numbers[turn] for turn in transcript.turns]
            return found

    def _extended_by(self, prompt_ids: Sequence[int], part: str) -> _SessionBranch | None:
        """Return the longest branch of the part that the prompt begins with."""
        found = []
        for branch in self._branches:
            ids = branch.transcript.token_ids
            if branch.part == part and prompt_ids[: len(ids)] == ids:
                found.append(branch)
        return max(found, key=lambda branch: len(branch.transcript.token_ids), default=None)


def _is_selected_part(part: str, parts: Collection[str]) -> bool:
    """Return whether a part is one of `parts`, or a part of one."""
    return any(part == one or part.startswith(f"{one}.") for one in parts)


class Permission(NamedTuple):
    """The permission of a token: `SAMPLE`, `REPORT` or `ROWS`, and the session that it is for."""

    scope: str
    session: str

    def __str__(self) -> str:
        if self.scope == ROWS:
            return "is the job's, which takes rows from /episodes/next and opens no session"
        verb = "sampling" if self.scope == SAMPLE else "reporting"
        return f"is for {verb} in {f'`{self.session}`' if self.session != ANY else 'any session'}"


class SessionRegistry:
    """A registry of open sessions, shared by the endpoint's and the engine's threads."""

    def __init__(self, context_length: int) -> None:
        self._free = SamplingSettings(context_length)
        self._open: dict[str, AgentSession] = {}
        self._lock = threading.Lock()
        self._key = secrets.token_bytes(32)

    def open(self, name: str, sampling: SamplingSettings, seed: int) -> AgentSession:
        """Open a session; the name must not contain a dot."""
        session = AgentSession(name, sampling, seed)
        with self._lock:
            self._open[name] = session
        return session

    def close(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)

    def find(self, part: str) -> AgentSession | None:
        """Return the open session with this name, or the one that a part of this name belongs
        to."""
        with self._lock:
            return self._open.get(part.partition(".")[0])

    def token(self, scope: str, session: str) -> str:
        """Return the token of a scope in a session, or in `ANY`, for a program that plays many
        episodes and names them by `X-Session-ID`. It is recomputed, not kept, so that it is
        recognised when the session is over."""
        head = f"{scope}-{session}"
        return f"{head}-{hmac.digest(self._key, head.encode(), 'sha256').hex()}"

    def permission(self, token: str) -> Permission | None:
        """Return the permission that a token gives; None if it is not a token of this endpoint."""
        scope, _, rest = token.partition("-")
        found = Permission(scope, rest.rpartition("-")[0])
        is_known = token.isascii() and hmac.compare_digest(token, self.token(*found))
        return found if is_known else None

    def untrained(self, seed: int | None) -> AgentSession:
        """Return a session for a request that names none; its samples are not trained on."""
        seed = secrets.randbits(62) if seed is None else seed
        return AgentSession(OWN, self._free, seed, is_trained=False)
