"""Teachers with tokenizers of their own, and behind a URL, in plain torch: what each says of a row
is worked out from texts, letter by letter, and imports nothing of what it checks."""

import json
import math
import threading
from collections import defaultdict
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby, pairwise

import plain_torch
import torch
from plain_cases import BASE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hybridrl.models.model_loading import make_tiny_model

LETTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz"
CONTROL = ("<pad>", "<eos>", "<unk>")
FINE = (("a", "b"), ("c", "d"))
COARSE = (("a", "b"), ("ab", "c"), ("b", "c"), ("+", "="), ("d", "e"), ("de", "f"))
MODELS = {"student": (FINE, 0, 7), "same": (FINE, 0, 8), "other": (COARSE, 5, 8)}


def merged_tokenizer(*merges, begin=0):
    """A tokenizer of single letters, from the alphabet's letter `begin` on, and of these pairs."""
    letters = LETTERS[begin:] + LETTERS[:begin]
    vocabulary = {t: n for n, t in enumerate([*CONTROL, *letters.replace(" ", "Ġ")])}
    for one, other in merges:
        vocabulary[one + other] = len(vocabulary)
    found = Tokenizer(models.BPE(vocabulary, list(merges), unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=found, clean_up_tokenization_spaces=False, **names
    )


def make_folders(root):
    """A student, teachers with its tokenizer and with another one, and rows."""
    for name, (merges, begin, seed) in MODELS.items():
        tokenizer = merged_tokenizer(*merges, begin=begin)
        shape = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 64}
        make_tiny_model(root / name, tokenizer, seed=seed, **shape)
        model = AutoModelForCausalLM.from_pretrained(root / name)
        with torch.no_grad():  # a model that begins without preferences has nothing to show
            for parameter in model.parameters():
                parameter *= 4 if parameter.ndim > 1 else 1
        model.save_pretrained(root / name)
    texts = ["abcab", "bcde+=", "abcdefabcdef", "defab1", "cdab+", "ab", "fdeabc"]
    rows = [{"prompt": f"{n}+ab", "answer": "1", "response": t} for n, t in enumerate(texts)]
    for name, part in (("rows", rows[1:]), ("held_out", rows[:1])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return root


def settings_of(folder, program, loss, *further):
    return [
        *(f"algorithm={program}", *BASE, f"model.path={folder}/student"),
        *("data=jsonl", f"data.path={folder}/rows.jsonl", "data.shuffle=false"),
        *(f"data.eval_path={folder}/held_out.jsonl", "rollout.max_tokens=9"),
        *(f"distillation.loss={loss}", "distillation.top_k=11", *further),
    ]


class Reading:
    """A row as the teacher reads it: its tokens and the letters at which they begin."""

    def __init__(self, row, student, teacher):
        self.student, self.teacher = student, teacher
        self.words = [self.word(student, i) for i in row["response_ids"]]
        self.ids = []
        for is_control, words in groupby(self.words, key=lambda w: w in CONTROL):
            read = teacher.convert_tokens_to_ids if is_control else self.letters
            self.ids += read(list(words))
        self.said = [self.word(teacher, i) for i in self.ids]
        self.row = {
            "prompt_ids": teacher(student.decode(row["prompt_ids"]))["input_ids"],
            "response_ids": self.ids,
        }
        self.at = []
        for words in (self.words, self.said):
            sizes = [1 if w in CONTROL else len(w) for w in words]
            self.at.append([sum(sizes[:n]) for n in range(len(sizes) + 1)])

    def letters(self, words):
        return self.teacher("".join(words))["input_ids"]

    @staticmethod
    def word(tokenizer, number):
        return tokenizer.convert_ids_to_tokens(number).replace("Ġ", " ")

    def chunks(self):
        """Pairs of the student's tokens and of the teacher's between boundaries of both."""
        ours, theirs = self.at
        both = sorted(set(ours) & set(theirs))
        for begin, end in pairwise(both):
            yield tuple([n for n, x in enumerate(at[:-1]) if begin <= x < end] for at in self.at)

    def lists(self, tables, k):
        """For each of the student's tokens what the teacher expects there, by token."""
        vocabulary = {w.replace("Ġ", " "): i for w, i in self.student.get_vocab().items()}
        ours, theirs = self.at
        chosen = tables.gather(1, torch.tensor(self.ids)[:, None])[:, 0]
        for n, word in enumerate(self.words):
            place = max(j for j, x in enumerate(theirs[:-1]) if x <= ours[n])
            begun = self.said[place][: ours[n] - theirs[place]]
            found, whole = defaultdict(float), 0.0
            top = tables[place].topk(min(k, tables.shape[1]))
            for weight, number in zip(top.values.exp().tolist(), top.indices.tolist(), strict=True):
                text = self.word(self.teacher, number)
                if text in CONTROL:
                    if not begun:
                        whole += weight
                        found[vocabulary[text]] += weight
                    continue
                if not text.startswith(begun):
                    continue
                whole += weight
                if number == self.ids[place]:
                    if ours[n + 1] > theirs[place + 1]:
                        if ours[n + 1] not in theirs:
                            continue
                        last = theirs.index(ours[n + 1])
                        weight *= math.exp(chosen[place + 1 : last].sum())
                    found[vocabulary[word]] += weight
                    continue
                rest = text[len(begun) :]
                fitting = [w for w in vocabulary if rest.startswith(w) and w not in CONTROL]
                if rest and fitting:
                    found[vocabulary[max(fitting, key=len)]] += weight
            yield {i: m / (whole if begun else 1.0) for i, m in found.items()}


class Job(plain_torch.Job):
    """A job with such a teacher."""

    def __init__(self, folder, teacher, aligned):
        self.teacher_path, self.aligned = teacher, aligned
        super().__init__(folder)
        self.other = AutoTokenizer.from_pretrained(teacher)

    def teacher_folder(self):
        return self.teacher_path

    def teach(self, row, temperature):
        if not self.aligned:
            super().teach(row, temperature)
            return
        reading = Reading(row, self.tokenizer, self.other)
        tables = self.teacher.distributions(reading.row, temperature)
        row["taught"] = list(reading.lists(tables, self.config["distillation"]["top_k"]))
        chosen = tables.gather(1, torch.tensor(reading.ids)[:, None])[:, 0]
        if "rollout" not in row:
            return
        row["gain"] = torch.full_like(row["rollout"], torch.nan)
        row["teacher"] = row["rollout"].clone()
        for ours, theirs in reading.chunks():
            gain = chosen[theirs].sum() - row["rollout"][ours].sum()
            row["gain"][ours] = gain
            row["teacher"][ours] += gain / len(ours)

    def far(self, student, row):
        if not self.aligned:
            return super().far(student, row)
        kind, found = self.config["distillation"]["loss"], []
        for p, listed in zip(student, row["taught"], strict=True):
            ids = list(listed)
            q = torch.tensor([listed[i] for i in ids]).double()
            p = p[ids].exp()
            p = torch.cat([p, (1 - p.sum()).clamp(min=1e-30)[None]])
            q = torch.cat([q, (1 - q.sum()).clamp(min=1e-7)[None]])
            one, other = (p, q) if kind == "reverse" else (q, p)
            found.append((one * (one / other).log()).sum())
        return torch.stack(found)


@contextmanager
def served(folder, *, longest=1000, breaks=None, drips=None):
    """A server of completions with a plain model; its address, and the requests that came.

    Args:
        longest: List of log-probabilities that it returns.
        breaks: What becomes of its answers: a function of the answer and the number of requests,
            which returns a status, an answer and perhaps headers.
        drips: With what an answer begins in place of its own; one byte after the other follows.
    """
    model, tokenizer = plain_torch.Model(folder).frozen(), AutoTokenizer.from_pretrained(folder)
    lock, is_over, requests = threading.Lock(), threading.Event(), []

    def answer(asked):
        ids = asked["prompt"]
        with lock, torch.no_grad():
            hidden, head = model.hidden(ids)
            tables = (hidden @ head.T).log_softmax(-1)
        places = [None]
        for table, number in zip(tables[:-1], ids[1:], strict=True):
            top = table.topk(min(asked["prompt_logprobs"], len(table))).indices.tolist()
            places.append(
                {
                    str(i): {"logprob": float(table[i]), "decoded_token": tokenizer.decode([i])}
                    for i in [number, *top]
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": places}]}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append({**asked, "key": self.headers["Authorization"]})
                count = len(requests)
            if asked["prompt_logprobs"] > longest:
                return self.reply(400, {"error": {"message": f"at most {longest} of them"}})
            if drips is not None:
                return self.drip()
            given = 200, answer(asked)
            if breaks is not None:
                given = breaks(given[1], count)
            return self.reply(*given)

        def reply(self, status, found, headers=()):
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in dict(headers).items():
                self.send_header(name, value)
            if status // 100 == 3:
                self.send_header("Location", found["Location"])
            self.end_headers()
            self.wfile.write(content)

        def drip(self):
            self.wfile.write(drips)
            while not is_over.wait(0.05):
                self.wfile.write(b" ")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
