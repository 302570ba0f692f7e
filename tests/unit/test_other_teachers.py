"""Teachers with another tokenizer, and behind a URL: whole jobs against plain torch, and what goes
wrong with a server."""

import math
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest
import torch
from other_teachers import Job, make_folders, served, settings_of
from settings import configured
from tiers import few_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl import main
from hybridrl.batch.batch import Batch
from hybridrl.controller import WorkerContext
from hybridrl.data.token_spelling import TokenSpelling
from hybridrl.errors import ConfigError, DataError, RemoteModelError
from hybridrl.job.config_resolution import load_config
from hybridrl.trainers.distillation import Trainer
from hybridrl.workers.remote_teacher import RemoteTeacher
from hybridrl.workers.teacher_reading import TeacherReading
from hybridrl.workers.training_engines import ModelSource

pytestmark = pytest.mark.usefixtures("process_group")
CLOSE = 1e-5
LOSSES = ("reverse", "forward", "sampled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("teachers"))


@pytest.fixture
def worked_out(tmp_path, folder):
    def finish(program, loss, teacher, *further):
        aligned, run = teacher == "other", tmp_path / "run"
        wanted = ["distillation.alignment=bytes"] if aligned else []
        settings = settings_of(folder, program, loss, *wanted, f"run.directory={run}", *further)
        main.run(load_config([*settings, "executor=inline"]))
        return Job(run, folder / teacher, aligned).run()

    return finish


def cases():
    found = [("distillation", loss) for loss in LOSSES]
    return found + [("offline_distillation", loss) for loss in LOSSES[:2]]


@pytest.mark.parametrize(
    ("program", "loss"),
    [pytest.param(*case, marks=pytest.mark.more if n else ()) for n, case in enumerate(cases())],
)
def test_a_job_of_two_tokenizers_is_what_plain_torch_makes_of_it(worked_out, folder, program, loss):
    found = worked_out(program, loss, "other", f"models.teacher.path={folder}/other")
    assert {"policy/loss", "policy/grad_norm", "weights"} <= found.keys()
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)


@pytest.mark.parametrize("teacher", few_of(["same", "other"], ["same"]))
@pytest.mark.parametrize(
    ("program", "loss"),
    [
        pytest.param(*case, marks=pytest.mark.more if n != 2 else ())
        for n, case in enumerate(cases())
    ],
)
def test_a_job_with_a_server_is_what_plain_torch_makes_of_it(
    worked_out, folder, program, loss, teacher
):
    with served(folder / teacher) as (url, requests):
        further = [f"models.teacher.tokenizer={folder}/other"] if teacher == "other" else []
        found = worked_out(program, loss, teacher, f"models.teacher.url={url}", *further)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)
    assert requests and not any("model" in row for row in requests)


SAMPLES = Batch.from_columns(
    {"prompt_ids": [[3, 20, 30]] * 3, "response_ids": [[31, 32, 1], [49, 33], [31]]}
)


@pytest.fixture
def connected(folder, monkeypatch):
    """Builds a teacher's connection; no attempt waits for the next."""
    monkeypatch.setattr("hybridrl.workers.remote_teacher.time.sleep", lambda _: None)
    built = []

    def connect(url, **further):
        source = ModelSource(str(folder / "student"), str(folder / "student"), "float32", 64, (1,))
        built.append(RemoteTeacher(WorkerContext("teacher", 0, 1), source, url, **further))
        return built[-1]

    yield connect
    for worker in built:
        worker.close()


def without_places(answer, _):
    del answer["choices"][0]["prompt_logprobs"]
    return 200, answer


def one_less(answer, _):
    del answer["choices"][0]["prompt_logprobs"][-1]
    return 200, answer


def other_tokens(answer, _):
    places = answer["choices"][0]["prompt_logprobs"]
    places[-1] = {"7": places[-1].popitem()[1]}
    return 200, answer


def with_log_prob(value):
    def breaks(answer, _):
        for place in answer["choices"][0]["prompt_logprobs"][-1:]:
            for one in place.values():
                one["logprob"] = value
        return 200, answer

    return breaks


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (without_places, "no `prompt_logprobs`"),
        (one_less, "tells of 5 tokens where 6 were sent"),
        (other_tokens, "does not tell the log-probability of token"),
        (with_log_prob(3.0), "the log-probability 3, of which nothing can be learned"),
        (with_log_prob(math.nan), "the log-probability nan"),
        (with_log_prob(-math.inf), "the log-probability -inf"),
        (with_log_prob(None), r"is no list of tokens with their `logprob`"),
        (with_log_prob(-(10**400)), r"is no list of tokens with their `logprob`"),
        (lambda *_: (404, {"error": "no such model"}), "refuses.*404.*no such model"),
        (lambda *_: (503, {}), "5 attempts have failed, the last with status 503"),
    ],
)
def test_an_answer_that_teaches_nothing_is_told_with_the_setting(connected, folder, breaks, said):
    said = rf"models\.teacher\.url=http://127.*{said}"
    with (
        served(folder / "same", breaks=breaks) as (url, _),
        pytest.raises(RemoteModelError, match=said),
    ):
        connected(url, top_k=4).compute_top_log_probs(SAMPLES.take([0]))


def test_a_redirect_takes_the_key_nowhere(connected, folder):
    with served(folder / "same") as (other, requests):
        moved = served(folder / "same", breaks=lambda *_: (302, {"Location": f"{other}/there"}))
        said = rf"it redirects to {other}/there. Name that address"
        with moved as (url, _), pytest.raises(RemoteModelError, match=said):
            connected(url, api_key="sesame-7").compute_ref_log_prob(SAMPLES)
        assert not requests


def test_an_address_of_a_redirect_is_told_without_what_is_secret_in_it(connected, folder):
    there = "http://sesame:hidden-1@host/v1?signature=hidden-2"
    moved = served(folder / "same", breaks=lambda *_: (302, {"Location": there}))
    with moved as (url, _), pytest.raises(RemoteModelError, match=r"redirects to http://s") as told:
        connected(url).compute_ref_log_prob(SAMPLES)
    assert "hidden" not in str(told.value)


def test_a_server_that_is_gone_busy_or_short_of_tokens(connected, folder):
    def busy(answer, count):
        return (503 if count <= 2 else 200), answer

    with served(folder / "same", breaks=busy, longest=8) as (url, requests):
        found = connected(url, top_k=4, api_key="sesame-7").compute_top_log_probs(SAMPLES)
        assert found.lengths("teacher_ids").tolist() == [12, 8, 4]
        assert len(requests) == 5 and {row["key"] for row in requests} == {"Bearer sesame-7"}
        with pytest.raises(RemoteModelError, match=r"at most 8.*top_k=9.*--max-logprobs"):
            connected(url, top_k=9).compute_top_log_probs(SAMPLES)
    with pytest.raises(RemoteModelError, match=r"5 attempts have failed.*refused"):
        connected(url).compute_ref_log_prob(SAMPLES)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("begun", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nSlow: "])
def test_a_server_that_sends_a_byte_now_and_then_is_late(connected, folder, begun):
    said = r"teacher\.url=http://127.*attempt 1 of 5.*a time-out.*teacher\.timeout=0\.3 seconds"
    slow = served(folder / "same", drips=begun)
    with slow as (url, _), pytest.raises(RemoteModelError, match=said):
        connected(url, timeout=0.3).compute_ref_log_prob(SAMPLES.take([0]))


def test_a_server_says_when_it_may_be_asked_again(connected, folder, monkeypatch):
    pauses = []

    def busy(answer, count):
        later = ["7", format_datetime(datetime.now(UTC) + timedelta(seconds=30), True), "soon"]
        return (429, {}, {"Retry-After": later[count - 1]}) if count <= 3 else (200, answer)

    with served(folder / "same", breaks=busy) as (url, _):
        worker = connected(url)
        monkeypatch.setattr("time.sleep", pauses.append)
        worker.compute_ref_log_prob(SAMPLES.take([0]))
    first, second, third = filter(None, pauses)
    assert (first, third) == (7.0, 4.0) and 20 < second <= 30
    much = served(folder / "same", breaks=lambda *_: (503, {}, {"Retry-After": "400"}))
    with much as (url, requests):
        said = r"attempt 1 of 5 has failed with status 503.*teacher\.timeout=300 seconds"
        with pytest.raises(RemoteModelError, match=said):
            connected(url).compute_ref_log_prob(SAMPLES.take([0]))
        assert len(requests) == 1


def test_a_server_with_another_tokenizer(connected, folder):
    said = r"alignment=bytes.*models\.teacher\.tokenizer"
    with served(folder / "other") as (url, _), pytest.raises(RemoteModelError, match=said):
        connected(url, top_k=4).compute_top_log_probs(SAMPLES)


def test_with_the_students_own_tokenizer_what_a_teacher_says_stays_as_it_is(connected, folder):
    with served(folder / "same") as (url, _):
        plain = connected(url, top_k=60)
        aligned = connected(url, top_k=60, alignment="bytes", tokenizer=str(folder / "same"))
        for name in ("compute_top_log_probs", "compute_ref_log_prob"):
            one, other = (getattr(worker, name)(SAMPLES) for worker in (plain, aligned))
            values = [[batch.ragged(n).values for n in batch.columns[:2]] for batch in (one, other)]
            if name == "compute_top_log_probs":  # in any order
                for part in values:
                    ids, order = part[0].view(-1, 60).sort(1)
                    part[:] = ids, part[1].view(-1, 60).gather(1, order)
            for expected, found in zip(*values, strict=False):
                torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("further", "said"),
    [
        (["models.teacher.url=host:80"], "must begin with http"),
        (["models.teacher.url=http://h", "rollout.temperature=0.7"], "temperature=1"),
        (["models.teacher.url=http://h", "models.teacher.tokenizer=t"], "needs both"),
        (["models.teacher.url=http://h", "distillation.alignment=bytes"], "needs both"),
        (["models.teacher.url=http://h", "models.teacher.timeout=0"], r"teacher\.timeout=0"),
        (["models.teacher.url=http://h", "models.teacher.path=p"], r"no setting.*teacher\.path"),
        (
            ["models.teacher.path=p", "distillation.alignment=bytes", "rollout.top_p=0.9"],
            "part of the vocabulary",
        ),
        (
            ["models.teacher.path=p", "distillation.alignment=bytes", "rollout.episode=f.py:F"],
            "with episodes",
        ),
    ],
)
def test_settings_of_teachers_that_contradict_each_other(further, said):
    chosen = ["algorithm=distillation", "distillation.loss=sampled", *further]
    with pytest.raises(ConfigError, match=said):
        Trainer.roles(configured(chosen))


def sentence_pieces():
    """A tokenizer that spells a space as SentencePiece does, and what it lacks by bytes."""
    words = ["▁", "h", "e", "l", "o", "▁he", "ll", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *words]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]
    for merged in (a + b for a, b in merges):
        tokens += [] if merged in tokens else [merged]
    model = models.BPE(
        {t: n for n, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True
    )
    found = Tokenizer(model)
    found.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)


def test_pieces_of_sentences_and_bytes_are_spelled():
    tokenizer = sentence_pieces()
    spelling = TokenSpelling(tokenizer)
    ids = tokenizer.encode("hello é", add_special_tokens=False)
    assert b"".join(map(spelling.spell, ids)).decode() == " hello é"
    assert spelling.spell(tokenizer.eos_token_id) is None
    assert tokenizer.convert_ids_to_tokens(spelling.first_token(b" heaven")) == "▁he"
    assert tokenizer.convert_ids_to_tokens(spelling.first_token("é".encode())) == "<0xC3>"


def test_words_without_pieces_of_text_are_refused():
    found = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    found.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token="[UNK]")
    with pytest.raises(ConfigError, match="no pieces of text"):
        TokenSpelling(tokenizer)


@pytest.fixture
def readings(tmp_path):
    """What a teacher reads of the responses of a student with bytes, and the other way round."""
    folders = [tmp_path / name for name in ("bytes", "pieces")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens = ["<eos>", *sorted(alphabet), "he", "hel"]
    found = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, [("h", "e"), ("he", "l")]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    both = [PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<eos>"), sentence_pieces()]
    both[0].chat_template = "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>"
    both[1].chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}:"
    for place, tokenizer in zip(folders, both, strict=True):
        tokenizer.save_pretrained(place)
    sources = [
        ModelSource("", str(f), "float32", 64, (t.eos_token_id,))
        for f, t in zip(folders, both, strict=True)
    ]
    one = TeacherReading(sources[0], str(folders[1]), None)
    return (one, *both), (TeacherReading(sources[1], str(folders[0]), None), *both[::-1])


def test_a_response_is_read_up_to_half_a_character_and_a_space_belongs_to_no_byte(readings):
    (reading, student, teacher), (back, _, _) = readings
    ids = student.encode("hello é")
    path = reading.read_response([*ids, 0])
    assert teacher.convert_ids_to_tokens(path.teacher)[0] == "▁hello"
    assert path.teacher[-1] == teacher.eos_token_id
    assert path.teacher_ends.tolist() == [5, 6, 7, 8, 9] and path.ends[-1] == 9
    cut = reading.read_response(ids[:-1])
    assert cut.teacher_ends.tolist() == [5, 6]
    ours, theirs = cut.chunks()
    assert ours.tolist() == [0, 0, 0, 1, -1] and theirs.tolist() == [0, 1]
    again = back.read_response(path.teacher.tolist())
    assert b"".join(map(TokenSpelling(student).spell, again.teacher[:-1])) == " hello é".encode()


def test_what_a_list_of_the_teachers_is_in_the_students_tokens(readings):
    """The student has written `he`, `l`, `l`; the teacher reads one token, `▁hello`."""
    (reading, student, teacher), _ = readings
    words = ["he", "l", "l", "o"]
    path = reading.read_response(student.convert_tokens_to_ids(words))
    assert teacher.convert_ids_to_tokens(path.teacher) == ["▁hello"]
    listed = ["▁hello", "▁he", "h", "</s>"]
    ids = [*teacher.convert_tokens_to_ids(listed), 10**6]  # the last is a row without a token
    shares = np.array([0.4, 0.2, 0.1, 0.1, 0.1])
    found, values = reading.translate(path, np.log([0.4]), np.array(ids, float), np.log(shares), 5)
    expected = [
        # The space that the teacher reads first is written by nobody.
        {"he": 1.0},
        {"l": 0.4 / 0.6},
        {"l": 1.0},
        {"o": 1.0},
    ]
    for row, log_shares, one in zip(
        found.reshape(4, 5), values.reshape(4, 5), expected, strict=True
    ):
        said = {
            student.convert_ids_to_tokens(int(i)): v
            for i, v in zip(row, log_shares, strict=True)
            if i >= 0
        }
        assert {word: np.exp(v) for word, v in said.items()} == pytest.approx(one)


def test_a_prompt_goes_into_the_teachers_chat_template(readings):
    (reading, student, teacher), _ = readings
    plain, chat = (student.encode(text) for text in ("hello", "<u>hello<a>"))
    batch = Batch.from_columns({"prompt_ids": [plain, chat], "response_ids": [[0], [0]]})
    prompts, _ = reading.read(batch)
    texts = [teacher.decode(row) for row in prompts.ragged("prompt_ids").rows()]
    assert texts[1].strip() == "[hello]:" and texts[0].strip().endswith("hello")
    several = student.encode("<u>hello<eos><u>he<a>")
    with pytest.raises(DataError, match=r"has `<eos>`, a control token of the student's"):
        reading.read(Batch.from_columns({"prompt_ids": [several], "response_ids": [[0]]}))
