"""TeacherReading: responses as a teacher with another tokenizer reads them, and its answers in the
student's tokens.

The two tokenizations of a text are laid over its bytes. The text between two boundaries that both
have is a chunk, of which both models have a log-probability (Minixhofer et al. 2025,
arXiv:2503.20083). A list of the teacher's likeliest tokens becomes one of the student's by what
these spell, as far as the student has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hybridrl.batch.arrow_columns import RaggedColumn
from hybridrl.batch.batch import TEACHER_CHUNKS, TEACHER_IDS, TEACHER_LOG_PROBS, Batch
from hybridrl.conversations.rendering import TemplateContext, render_chat
from hybridrl.data.encoding import special_token_pattern
from hybridrl.data.token_spelling import NO_TOKEN, TokenSpelling
from hybridrl.errors import DataError
from hybridrl.models.model_loading import load_tokenizer
from hybridrl.rollout.rollout_engine import ragged
from hybridrl.workers.training_engines import ModelSource

_Numbers = npt.NDArray[np.int64]
_MARK = "hybridrl5e27prompt"


class TokenPath(NamedTuple):
    """A response in both tokenizations, over the bytes that the teacher reads and a place for each
    control token.

    Attributes:
        student, teacher: The tokens.
        starts, ends: Of the student's tokens; where they are equal, the teacher does not read it.
        teacher_ends: Of the teacher's tokens, which are neighbours, the first one from 0.
    """

    student: _Numbers
    starts: _Numbers
    ends: _Numbers
    teacher: _Numbers
    teacher_ends: _Numbers

    def chunks(self) -> tuple[_Numbers, _Numbers]:
        """Return the number of each token's chunk, -1 for none: of the student's tokens, and of the
        teacher's."""
        read = self.ends > self.starts
        common = np.intersect1d(self.ends[read], self.teacher_ends)
        found = []
        for ends in (self.ends, self.teacher_ends):
            numbers = np.searchsorted(common, ends)
            found.append(np.where(numbers < len(common), numbers, -1))
        return np.where(read, found[0], -1), found[1]


class TeacherReading:
    """The teacher's view of samples, with its own tokenizer and chat template.

    Args:
        source: Of the student's tokenizer, its end tokens and its template's variables.
        teacher: Folder or hub name of the teacher's tokenizer.
        system_prompt: Of the student's chats (`data.system_prompt`).
    """

    def __init__(self, source: ModelSource, teacher: str, system_prompt: str | None) -> None:
        self._student = TokenSpelling(load_tokenizer(source.tokenizer))
        self._teacher = TokenSpelling(load_tokenizer(teacher))
        ends = {*source.eos_token_ids, self._student.end}
        self._controls = {
            number: self._teacher.control[name]
            for name, number in self._student.control.items()
            if name in self._teacher.control
        } | dict.fromkeys(ends, self._teacher.end)
        vocabulary = self._teacher.tokenizer.get_vocab().values()
        # The last one stands in the place of `NO_TOKEN`.
        self._first_tokens = np.full(max(vocabulary) + 2, NO_TOKEN, np.int64)
        for token in vocabulary:
            self._first_tokens[token] = self._student.first_token(self._teacher.spell(token) or b"")
        for ours, theirs in self._controls.items():
            self._first_tokens[theirs] = ours
        self._first_tokens[self._teacher.end] = self._student.end
        self._frames = [
            _frame_prompts(side, source.template, system_prompt)
            for side in (self._student, self._teacher)
        ]

    def read(self, batch: Batch) -> tuple[Batch, list[TokenPath]]:
        """Return the samples in the teacher's tokens, and how the responses fit the student's."""
        paths = [self.read_response(row.tolist()) for row in batch.ragged("response_ids").rows()]
        prompts, known = [], dict[tuple[int, ...], list[int]]()
        for row in batch.ragged("prompt_ids").rows():
            ids = tuple(row.tolist())
            if ids not in known:
                known[ids] = self._read_prompt(ids)
            prompts.append(known[ids])
        columns = {
            "prompt_ids": ragged(prompts, np.int64),
            "response_ids": ragged([path.teacher for path in paths], np.int64),
        }
        return Batch.from_columns(columns), paths

    def read_response(self, ids: Sequence[int]) -> TokenPath:
        """Lay a response and the teacher's tokens over its bytes. The teacher reads it up to the
        first bytes that are no text, such as half a character at the end, or that it cannot
        spell."""
        lengths, pieces = [], list[bytes | int]()
        for token in ids:
            spelled, control = self._student.spell(token), self._controls.get(token)
            if control is not None:
                pieces.append(control)
                lengths.append(1)
                continue
            spelled = spelled or b""
            lengths.append(len(spelled))
            if pieces and isinstance(pieces[-1], bytes):
                pieces[-1] += spelled
            else:
                pieces.append(spelled)
        teacher, teacher_lengths = list[int](), list[int]()
        for piece in pieces:
            if isinstance(piece, int):
                teacher.append(piece)
                teacher_lengths.append(1)
                continue
            tokens, sizes = self._encode(piece)
            teacher += tokens
            teacher_lengths += sizes
            if sum(sizes) < len(piece):
                break
        bounds = np.cumsum([0, *lengths])
        return TokenPath(
            *(np.asarray(ids, np.int64), bounds[:-1], bounds[1:]),
            *(np.asarray(teacher, np.int64), np.cumsum(teacher_lengths, dtype=np.int64)),
        )

    def top_columns(
        self,
        paths: Sequence[TokenPath],
        scored: RaggedColumn,
        ids: RaggedColumn,
        log_probs: RaggedColumn,
        *,
        top_k: int,
    ) -> Batch:
        """Return `teacher_ids` and `teacher_log_probs` in the student's tokens.

        Args:
            scored, ids, log_probs: What the teacher says in the place of each of its tokens: of
                that token, and its likeliest tokens.
            top_k: How many of these.
        """
        columns: dict[str, list[npt.NDArray[Any]]] = {TEACHER_IDS: [], TEACHER_LOG_PROBS: []}
        said = zip(paths, scored.rows(), ids.rows(), log_probs.rows(), strict=True)
        for path, *row in said:
            parts = [part.double().numpy() for part in row]
            found = self.translate(path, parts[0], parts[1], parts[2], top_k)
            for column, values in zip(columns.values(), found, strict=True):
                column.append(values)
        return Batch.from_columns({name: ragged(x, np.float32) for name, x in columns.items()})

    def translate(
        self,
        path: TokenPath,
        scored: npt.NDArray[np.float64],
        ids: npt.NDArray[np.float64],
        log_probs: npt.NDArray[np.float64],
        top_k: int,
    ) -> tuple[_Numbers, npt.NDArray[np.float64]]:
        """Return the teacher's lists for each of the student's tokens, flat, `[tokens x k]`.

        The list stands in the place of the teacher's token in which the student's begins. Its
        tokens that begin with what the student has written of it by then count, by what is left of
        them: as the student's token with the same bytes, or the longest one that they begin with.
        The token that the teacher reads stands for the one that the student wrote, with the
        teacher's further tokens up to its end. Places that nothing is known of list no token.
        """
        found = np.full((len(path.student), top_k), NO_TOKEN, np.int64)
        values = np.full(found.shape, -np.inf)
        bounds = path.teacher_ends
        total = bounds[-1] if len(bounds) else 0
        places = np.flatnonzero((path.ends > path.starts) & (path.starts < total))
        starts, ends = path.starts[places], path.ends[places]
        at, last = np.searchsorted(bounds, starts, side="right"), np.searchsorted(bounds, ends)
        theirs = np.nan_to_num(ids, nan=NO_TOKEN).astype(np.int64).reshape(-1, top_k)[at]
        mass = np.exp(log_probs.reshape(-1, top_k)[at])
        is_word = theirs < len(self._first_tokens) - 1  # a model may have rows to fill up with
        ours = self._first_tokens[np.where(is_word, theirs, NO_TOKEN)]
        for row, left in enumerate(bounds[at] - starts):
            spelled = self._teacher.spell(path.teacher[at[row]]) or b""
            if begun := spelled[: max(0, len(spelled) - left)]:
                ours[row], mass[row] = self._continue(begun, theirs[row], mass[row])
        is_read = theirs == path.teacher[at][:, None]
        within = np.minimum(last, len(bounds) - 1)
        fits = (last == at) | (bounds[within] == ends)
        sums = np.cumsum([0.0, *scored])
        further = np.exp(np.where(fits, sums[within + 1] - sums[at + 1], 0.0))
        ours = np.where(is_read, np.where(fits, path.student[places], NO_TOKEN)[:, None], ours)
        mass = np.where(is_read, mass * further[:, None], mass)
        rows, columns = np.nonzero(ours != NO_TOKEN)
        keys, same = np.unique(rows << 32 | ours[rows, columns], return_inverse=True)
        rows = keys >> 32
        columns = np.arange(len(keys)) - np.searchsorted(rows, rows)
        found[places[rows], columns] = keys & 0xFFFFFFFF
        with np.errstate(divide="ignore"):
            sums = np.log(np.bincount(same, mass[ours != NO_TOKEN]))
        values[places[rows], columns] = sums
        return found.ravel(), values.ravel()

    def _continue(
        self, begun: bytes, theirs: _Numbers, mass: npt.NDArray[np.float64]
    ) -> tuple[_Numbers, npt.NDArray[np.float64]]:
        """Return the student's tokens for what is left of those that begin so, and the
        probabilities among these."""
        texts = [self._teacher.spell(token) or b"" for token in theirs.tolist()]
        fits = np.array([text.startswith(begun) for text in texts])
        whole = mass[fits].sum()
        ours = [self._student.first_token(text[len(begun) :]) for text in texts]
        return np.where(fits, ours, NO_TOKEN), mass / (whole if fits.any() and whole else 1.0)

    def _encode(self, text: bytes) -> tuple[list[int], list[int]]:
        """Return the teacher's tokens for as much of a text as it can spell, and their lengths in
        bytes. A space that its tokenizer puts before a text belongs to the first token and to no
        byte."""
        try:
            readable = text.decode()
        except UnicodeDecodeError as error:
            readable = text[: error.start].decode()
        ids = self._teacher.tokenizer.encode(readable, add_special_tokens=False)
        spelled = [self._teacher.spell(token) for token in ids]
        wanted, position = readable.encode(), 0
        if spelled and (spelled[0] or b"").startswith(b" ") and not wanted.startswith(b" "):
            wanted = b" " + wanted
        lead, lengths = len(wanted) - len(readable.encode()), list[int]()
        for part in spelled:
            if part is None or not wanted.startswith(part, position):
                break
            position += len(part)
            lengths.append(len(part) - (lead if not lengths else 0))
        return ids[: len(lengths)], lengths

    def _read_prompt(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt in the teacher's tokens, one message of a user's in its own template."""
        student, teacher = self._student.tokenizer, self._teacher.tokenizer
        text, (ours, theirs) = str(student.decode(list(ids))), self._frames
        is_chat = ours is not None and text.startswith(ours[0]) and text.endswith(ours[1])
        if is_chat:
            assert ours is not None
            text = text[len(ours[0]) : len(text) - len(ours[1])]
        else:
            text = text.removeprefix(student.bos_token or "")
        if found := special_token_pattern(student).search(text):
            raise DataError(
                f"distillation.alignment=bytes: a prompt has `{found[0]}`, a control token of the "
                f"student's, in {text[:60]!r}. A teacher with another tokenizer reads plain text, "
                "or one user's message, which its own chat template renders. Leave conversations "
                "of several messages out, or take a teacher of the student's family."
            )
        if is_chat and theirs is not None:
            text = text.join(theirs)
        return list(teacher.encode(text, add_special_tokens=not (is_chat and theirs is not None)))


def score_responses(
    reading: TeacherReading | None, batch: Batch, score: Callable[[Batch], RaggedColumn]
) -> Batch:
    """Return the `ref_log_probs` of the responses, as a teacher scores them; of one with a
    tokenizer of its own those of chunks, and `teacher_chunks`."""
    if reading is None:
        return Batch.from_columns({"ref_log_probs": score(batch)})
    read, paths = reading.read(batch)
    return chunk_columns(paths, score(read))


def list_top_tokens(
    reading: TeacherReading | None,
    batch: Batch,
    ask: Callable[[Batch], Iterable[RaggedColumn]],
    top_k: int,
) -> Batch:
    """Return the `teacher_ids` and `teacher_log_probs` of the responses, in the student's tokens.

    Args:
        reading: Of a teacher with a tokenizer of its own.
        ask: Gives what the teacher says in the place of each of its tokens: the log-probability of
            that token, and its `top_k` likeliest tokens with theirs.
    """
    if reading is None:
        _, ids, log_probs = ask(batch)
        return Batch.from_columns({TEACHER_IDS: ids, TEACHER_LOG_PROBS: log_probs})
    read, paths = reading.read(batch)
    return reading.top_columns(paths, *ask(read), top_k=top_k)


def chunk_columns(paths: Sequence[TokenPath], scored: RaggedColumn) -> Batch:
    """Return the columns `ref_log_probs`, the teacher's log-probability of a chunk in equal
    parts on the student's tokens, and `teacher_chunks`, the chunk of each."""
    parts, numbers = [], []
    for path, log_probs in zip(paths, scored.rows(), strict=True):
        ours, theirs = path.chunks()
        count = max(ours.max(initial=-1), theirs.max(initial=-1)) + 1
        inside = theirs >= 0
        sums = np.bincount(theirs[inside], log_probs.numpy()[inside], minlength=count)
        sizes = np.bincount(ours[ours >= 0], minlength=count)
        shares = np.append(sums / np.maximum(sizes, 1), 0.0)
        parts.append(shares[ours])
        numbers.append(ours)
    return Batch.from_columns(
        {"ref_log_probs": ragged(parts, np.float32), TEACHER_CHUNKS: ragged(numbers, np.int64)}
    )


def _frame_prompts(
    side: TokenSpelling, context: TemplateContext, system_prompt: str | None
) -> tuple[str, str] | None:
    """Return what the chat template writes before and behind a user's message, up to where the
    answer begins; None without a template."""
    if not side.tokenizer.chat_template:
        return None
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": _MARK})
    before, _, behind = render_chat(side.tokenizer, messages, context, ask=True).partition(_MARK)
    return before, behind
