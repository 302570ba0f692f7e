"""Whole jobs once more, in plain torch and transformers: nothing here imports what it checks.

`recompute` reads what a run's folder says of its settings and samples, and the model that it began
with. One sample at a time, it works out log-probabilities, advantages, losses and gradients again,
takes the same optimizer steps, and compares every number on the way, and the weights at the end.
"""

import copy
import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn.functional import kl_div, logsigmoid, nll_loss
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

FLOOR = 0.1
"""Differences are relative to the expected number, or to this if it is smaller: sums of terms of
size 1 that cancel have the rounding of their terms."""

STEP_KL, OF_KL = "policy/step_kl", 0.01
"""What a step moves the policy by is small."""
VAGUE = 1e-5
"""Of a tensor's largest gradient: smaller ones are mostly rounding."""


class Model:
    """A language model, or one with a scalar head, with adapters or without. `trained` are the
    tensors that learn, by name."""

    def __init__(self, folder, *, scalar=False, adapters=None, bits=None):
        head = "score.weight" if scalar else "lm_head.weight"
        kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
        options = {"num_labels": 1} if scalar else {}
        net = kind.from_pretrained(folder, attn_implementation="eager", **options)
        self.net, tensors = net.base_model.double(), {}
        if scalar and head not in weights_in(folder):
            torch.nn.init.zeros_(net.score.weight)  # a new head says 0
        for name, tensor in net.named_parameters():
            tensors[name] = tensor.detach().double()
            if bits == "nf4" and tensor.ndim == 2 and ".layers." in name:
                tensors[name] = in_nf4(tensor.detach()).double()
        self.base, self.head, self.rank_scale = tensors, head, None
        self.trained = tensors
        if adapters is not None:
            settings = json.loads((Path(adapters) / "adapter_config.json").read_text())
            self.rank_scale = settings["lora_alpha"] / settings["r"]
            self.trained = {
                name.removeprefix("base_model.model."): tensor.double()
                for name, tensor in weights_in(adapters).items()
            }
            if scalar:
                self.trained[head] = tensors[head]
        self.trained = {k: v.clone().requires_grad_() for k, v in self.trained.items()}

    def frozen(self, trained=None):
        """A copy that does not learn, of these weights, or of those of now."""
        found = copy.copy(self)
        of = self.trained if trained is None else trained
        found.trained = {name: tensor.detach().clone() for name, tensor in of.items()}
        return found

    def hidden(self, ids):
        """The state behind each token, and the weight of the head."""
        weights = {**self.base, **{k: v for k, v in self.trained.items() if ".lora_" not in k}}
        for down in (name for name in self.trained if ".lora_A." in name):
            name = down.replace(".lora_A", "")
            up = self.trained[down.replace(".lora_A.", ".lora_B.")]
            weights[name] = weights[name] + self.rank_scale * (up @ self.trained[down])
        head = weights.get(self.head, weights["model.embed_tokens.weight"])
        body = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
        return functional_call(self.net, body, (torch.tensor([ids]),)).last_hidden_state[0], head

    def distributions(self, row, temperature):
        """log softmax before each token of the response."""
        prompt, response = row["prompt_ids"], row["response_ids"]
        hidden, head = self.hidden(prompt + response)
        return (hidden[len(prompt) - 1 : -1] @ head.T / temperature).log_softmax(-1)

    def log_probs(self, row, temperature):
        """Of the response's tokens; and the entropy in the place of each."""
        found = self.distributions(row, temperature)
        if "kept" in row:
            found = found.masked_fill(~row["kept"], -math.inf).log_softmax(-1)
            found = found.masked_fill(~row["kept"], -1e9)  # of probability 0, but no NaN
        chosen = -nll_loss(found, torch.tensor(row["response_ids"]), reduction="none")
        return chosen, -(found.exp() * found).sum(-1)

    def values(self, row):
        """What the scalar head says before each token of the response."""
        hidden, head = self.hidden(row["prompt_ids"] + row["response_ids"])
        return (hidden @ head.T)[len(row["prompt_ids"]) - 1 : -1, 0]

    def score(self, row):
        """What the scalar head says at the end."""
        hidden, head = self.hidden(row["prompt_ids"] + row["response_ids"])
        return (hidden[-1] @ head.T)[0]

    @torch.no_grad()
    def greedy(self, prompt, longest, ends):
        """The likeliest response."""
        response = []
        while len(response) < longest and not (response and response[-1] in ends):
            hidden, head = self.hidden(prompt + response)
            response.append(int((hidden[-1] @ head.T).argmax()))
        return response


def normal_quantiles():
    """The 16 values of NF4 (arXiv:2305.14314, appendix E): eight quantiles of the normal
    distribution below 0 and nine from 0 on, 0 once, such that the largest is 1."""
    normal, last = NormalDist(), 0.9677083
    up, down = (
        [normal.inv_cdf(last + (0.5 - last) * n / count) for n in range(count)] for count in (8, 7)
    )
    return torch.tensor(sorted([-x for x in down] + [0.0] + up), dtype=torch.float64) / max(up)


def in_nf4(matrix):
    """Of each 64 numbers in a row of all the nearest quantile times the largest; and of the largest
    ones, less their mean, each as a moment in 8 bits."""
    values = matrix.flatten().tolist()
    blocks = [values[at : at + 64] for at in range(0, len(values), 64)]
    largest = torch.tensor([max(map(abs, block)) for block in blocks])
    scales = in_8_bits((largest - largest.mean())[None].double(), True)[0] + largest.mean()
    levels, found = normal_quantiles(), []
    for block, most, scale in zip(blocks, largest, scales, strict=True):
        units = torch.tensor(block).double() / (most or 1.0)
        found.append(levels[(units[:, None] - levels).abs().argmin(1)] * scale)
    return torch.cat(found).view(matrix.shape)


def in_8_bits(matrix, signed):
    """Block-wise dynamic quantization (arXiv:2110.02861): of each 256 neighbours of a row the share
    of the one furthest from 0 that is nearest, of 256. Where none may be below 0, 0 is 0 only."""
    shares = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent if signed else 2 ** (exponent + 1)
        middles = [0.1 + 0.9 * (n + 0.5) / count for n in range(count)]
        shares += [
            sign * m * 10.0 ** (exponent - 6) for m in middles for sign in (1, -1)[: signed + 1]
        ]
    shares = torch.tensor(sorted(shares)).double()
    found = torch.zeros_like(matrix)
    for row, into in zip(matrix, found, strict=True):
        for at in range(0, len(row), 256):
            block = row[at : at + 256]
            scale = block[block.abs().argmax()]
            if scale:
                far = (block[:, None] / scale - shares).abs()
                if not signed:
                    far[block > 0, 0] = math.inf
                into[at : at + 256] = shares[far.argmin(1)] * scale
    return found


class Learner:
    """A model with its optimizer and schedule."""

    def __init__(self, model, settings, updates):
        self.model, self.settings, self.updates, self.done = model, settings, updates, 0
        self.vague = {k: torch.zeros_like(v, dtype=bool) for k, v in model.trained.items()}
        name, decay = settings.get("name", "adamw"), settings["weight_decay"]
        hidden = [n for n, p in model.trained.items() if ".layers." in n and p.ndim == 2]
        muons = [model.trained[n] for n in hidden] if name == "muon" else []
        others = [p for n, p in model.trained.items() if not muons or n not in hidden]
        groups = [
            {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.encodes = settings.get("moments") == "int8"
        if name == "adafactor":
            self.optimizers = [torch.optim.Adafactor(groups, eps=(2.0**-23, 1e-3))]
        else:
            self.optimizers = [torch.optim.AdamW(groups, betas=tuple(settings["betas"]))]
        if muons:
            way = {"weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
            self.optimizers.append(torch.optim.Muon(muons, **way))

    def rate(self):
        of, step = self.settings, self.done
        if step < of["warmup_steps"]:
            return of["learning_rate"] * (step + 1) / of["warmup_steps"]
        if of["schedule"] == "constant":
            return of["learning_rate"]
        if of["schedule"] == "inverse_sqrt":
            unit = max(1, of["warmup_steps"])
            return of["learning_rate"] * max(
                of["min_ratio"], (unit / (unit + step - of["warmup_steps"])) ** 0.5
            )
        span = max(1, self.updates - 1 - of["warmup_steps"])
        gone = min(1.0, (step - of["warmup_steps"]) / span)
        fall = 1 - gone if of["schedule"] == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return of["learning_rate"] * (of["min_ratio"] + (1 - of["min_ratio"]) * fall)

    def step(self, loss):
        """One update; the norm of the gradient before it is clipped."""
        tensors = list(self.model.trained.values())
        zero = sum(0.0 * tensor.sum() for tensor in tensors)
        gradients = torch.autograd.grad(loss + zero, tensors)
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        # Adam moves by as much where a gradient is no larger than its rounding.
        for name, gradient in zip(self.model.trained, gradients, strict=True):
            size = gradient.abs()
            self.vague[name] |= (size > 0) & (size < VAGUE * size.max())
        most = self.settings["max_grad_norm"]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient * (most / norm) if 0 < most < norm else gradient
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate()
            optimizer.step()
            for tensor, state in optimizer.state.items():
                for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    if self.encodes and tensor.ndim == 2 and name in state:
                        state[name] = in_8_bits(state[name], name != "exp_avg_sq")
        self.done += 1
        return norm


def weights_in(folder):
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


# Advantages: of each sample a number for each token. `scores` are NaN for dropped samples.


def by_group(groups, scores):
    members = defaultdict(list)
    for number, group in enumerate(groups):
        if not math.isnan(scores[number]):
            members[group].append(number)
    return [(at, torch.tensor([scores[n] for n in at]).double()) for at in members.values()]


def compared(settings, groups, scores, lengths):
    """Advantages of whole samples, compared within their groups."""
    kind, scale, found = settings["advantage"], settings["advantage_scale"], [0.0] * len(scores)
    known = torch.tensor([s for s in scores if not math.isnan(s)]).double()
    for at, s in by_group(groups, scores):
        if len(at) < 2:
            continue
        if kind == "leave_one_out":
            a = s - (s.sum() - s) / (len(at) - 1)
        elif kind == "optimal_reward_baseline":
            tokens = torch.tensor([lengths[n] for n in at]).double()
            a = s - (tokens * s).sum() / tokens.sum()
        elif kind == "maximum_likelihood":
            a = (s - s.mean()) / s.mean() if s.mean() > 1e-6 else 0.0 * s
        elif kind == "pass_at_k":
            second, best = s.sort().values[-2:]
            a = torch.where(s == best, best - second, 0.0)
        else:
            a = s - s.mean()
        if kind in ("group_relative", "pass_at_k") and scale != "none":
            a = a / ((s.std() if scale == "std" else known.std()) + 1e-6)
        for number, value in zip(at, a.tolist(), strict=True):
            found[number] = value
    return found


def decoupled(rows, groups, scores, weights):
    """Advantages of several rewards, each compared within the groups; then over the batch."""
    total = torch.zeros(len(rows)).double()
    for column, weight in weights.items():
        for at, _ in by_group(groups, scores):
            s = torch.tensor([rows[n][column] for n in at]).double()
            total[at] += weight * (s - s.mean()) / (s.std() + 1e-6) if len(at) > 1 else 0.0
    return ((total - total.mean()) / (total.std() + 1e-6)).tolist()


def whitened(rows, masks):
    every = torch.cat([x[m] for x, m in zip(rows, masks, strict=True)])
    if len(every) < 2:
        return [0.0 * x for x in rows]
    return [(x - every.mean()) / (every.var() + 1e-8).sqrt() for x in rows]


def over_deviation(rows, masks):
    """Divided by the standard deviation; by a tenth of the mean if that is more."""
    every = torch.cat([x[m] for x, m in zip(rows, masks, strict=True)])
    divisor = max(float(every.std()), abs(float(every.mean())) / 10)
    return [x / divisor if divisor else x for x in rows]


def to_go(rewards, mask, gamma):
    found, later = torch.zeros_like(rewards), 0.0
    for t in reversed(mask.nonzero()[:, 0].tolist()):
        found[t] = later = float(rewards[t]) + gamma * later
    return found


def estimated(rewards, values, mask, gamma, lam):
    """Advantages by GAE, and returns."""
    found, after, value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(mask.nonzero()[:, 0].tolist()):
        after = float(rewards[t]) + gamma * value - float(values[t]) + gamma * lam * after
        found[t], value = after, float(values[t])
    return found, found + values


def divergence(x, kind):
    """Of log-probabilities that are further than a reference's by x; of a token 10 at most."""
    x = x.clamp(-20, 20)
    k2, name = x.square() / 2, kind.removesuffix("+")
    value = {"k1": x, "k2": k2, "k3": torch.exp(-x) + x - 1, "abs": x.abs()}[name]
    value = value.clamp(-10, 10)
    return value if name == kind else value.detach() + k2 - k2.detach()


# Losses of each token.


def policy_loss(settings, log_probs, old, advantages, mask):
    gap, a = log_probs - old, advantages
    ratio, kind = gap.exp(), settings["policy_loss"]
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    if kind == "reinforce":
        return -a * log_probs
    if kind == "cispo":
        return -ratio.detach().clamp(low, high) * a * log_probs
    if kind == "sapo":
        options = settings["loss_options"]
        tau = torch.where(a > 0, options["tau_positive"], options["tau_negative"])
        return -a * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    if kind == "vespo":
        ratio = gap[mask].sum().detach().exp()
        powers = torch.where(a >= 0, ratio**2, ratio**3)
        fades = torch.exp(torch.where(a >= 0, 3.0, 2.0) * (1 - ratio))
        return -powers * fades * a * log_probs
    if kind in ("dppo_tv", "dppo_kl"):
        p, q = log_probs.detach().exp(), old.exp()
        far = (p - q).abs()
        if kind == "dppo_kl":
            far = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        out = (a > 0) & (p > q) & (far > settings["clip_high"])
        out |= (a < 0) & (p < q) & (far > settings["clip_low"])
        return torch.where(out, 0.0, -a * ratio)
    if kind == "gmpo":
        up, down = gap.clamp(max=settings["clip_high"]), gap.clamp(min=-settings["clip_low"])
        return -a * torch.where(a > 0, up, down)[mask].mean().exp()
    if kind == "gspo":
        ratio = (gap[mask].mean().detach() + log_probs - log_probs.detach()).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    if kind == "ppo_clip" and settings["dual_clip"]:
        loss = torch.where(a < 0, torch.minimum(loss, -a * settings["dual_clip"]), loss)
    return loss


def correction(settings, log_probs, rollout, mask):
    """Weights of tokens that another policy sampled."""
    gap = log_probs - rollout
    if settings["correction"] == "kpop":
        p, q = log_probs.double().exp(), rollout.double().exp()
        there = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        back = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
        return gap.exp() * (torch.maximum(there, back) <= settings["correction_kl"])
    if settings["correction_level"] == "sequence":
        gap = torch.full_like(gap, float(gap[mask].sum()))
    if settings["correction_level"] == "geometric":
        gap = torch.full_like(gap, float(gap[mask].mean()))
    weights, high = gap.exp(), settings["correction_high"]
    if settings["correction"] != "mask":
        return weights.clamp(max=high)
    return weights * ((weights >= (settings["correction_low"] or 0.0)) & (weights <= high))


def token_weights(mode, masks, longest):
    """Of each sample, the weight of each of its tokens."""
    tokens = max(1, sum(int(m.sum()) for m in masks))
    samples = max(1, sum(bool(m.any()) for m in masks))
    return [
        {
            "token-mean": 1 / tokens,
            "seq-mean-token-mean": 1 / samples / max(1, int(mask.sum())),
            "seq-mean-token-sum": 1 / samples,
            "seq-mean-token-sum-norm": 1 / samples / longest,
            "token-sum": 1.0,
        }[mode]
        for mask in masks
    ]


def pair_loss(settings, chosen, rejected, chosen_log_probs):
    """Of two answers' log-probabilities by token, for DPO and IPO less those of the reference; and
    how far the chosen one is ahead."""
    kind, beta, weight = settings["loss"], settings["beta"], settings["nll_coefficient"]
    by_mean = settings["length_normalised"] or kind in ("simpo", "orpo")
    one, other = ((x.mean() if by_mean else x.sum()) for x in (chosen, rejected))
    nll = -chosen_log_probs.mean()
    if kind == "orpo":
        ahead = torch.log(one.exp() / (1 - one.exp()) / other.exp() * (1 - other.exp()))
        return nll - beta * logsigmoid(ahead), ahead.item()
    h = one - other
    if kind == "ipo":
        loss = (h - 1 / (2 * beta)) ** 2
    else:
        loss = -logsigmoid(beta * h - (settings["margin"] if kind == "simpo" else 0.0))
    return loss + weight * nll, beta * h.item()


def distance(student, teacher, kind, k):
    """KL of two tables of log-probabilities, in which all but the teacher's k likeliest tokens
    count as one."""
    ids = teacher.topk(min(k, teacher.shape[1]), dim=1).indices
    both = []
    for table in (student, teacher):
        listed = table.gather(1, ids)
        rest = (1 - listed.exp().sum(1, keepdim=True)).clamp(min=1e-7)
        both.append(torch.cat([listed, rest.log()], 1))
    p, q = both if kind == "reverse" else both[::-1]
    return kl_div(q, p, reduction="none", log_target=True).sum(1)


WHOLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
"""The settings that leave tokens out of the choice, as they leave none."""


class Job:
    """What a run's folder says, worked out again.

    Args:
        folder: Of the run, with `observe.samples_every=1`.
        rewarded: The reward function, for greedy answers, which no file has.
    """

    def __init__(self, folder, rewarded=None):
        self.folder, self.rewarded = Path(folder), rewarded
        self.config = yaml.safe_load((self.folder / "config.yaml").read_text())
        self.algorithm, rollout = self.config["algorithm"], self.config["rollout"]
        self.program, self.longest = self.config["trainer"]["name"], rollout["max_tokens"]
        self.given = self.program in (
            *("sft", "dpo", "kto", "reward_model", "offline_distillation"),
        )
        self.temperature = 1.0 if self.given else rollout["temperature"]
        self.splits = self.config["actor"]["updates_per_step"]
        self.epochs, self.most = self.config["actor"]["epochs"], self.config["actor"]["max_kl"]
        self.tokenizer = AutoTokenizer.from_pretrained(self.config["model"]["path"])
        self.differences, self.metrics = {}, {}
        for line in (self.folder / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            self.metrics[row["step"]] = self.metrics.get(row["step"], {}) | row
        steps, path = self.config["trainer"]["steps"], self.config["model"]["path"]
        adapters = self.config["actor"]["lora"]["path"]
        updates = steps * self.splits * self.epochs
        updates += steps if self.algorithm["ptx_coefficient"] else 0
        optimizer = self.config["actor"]["optimizer"]
        scalar = self.program == "reward_model"
        bits = self.config["actor"]["lora"].get("base_format")
        start = Model(path, scalar=scalar, adapters=adapters, bits=bits)
        self.actor = Learner(start, optimizer, updates)
        self.reference = self.actor.model.frozen()
        self.history = [self.reference]
        self.critics = {}
        self.critic_epochs = self.config["critic"]["epochs"] or self.epochs
        prefixes = {"ppo": [""], "safe_rlhf": ["", "cost_"]}.get(self.program, [])
        for prefix in prefixes:
            own = self.config["models"].get(f"{prefix}critic") or {}
            start, of = own.get("path"), optimizer | own.get("optimizer", {})
            model = Model(
                start or path, scalar=True, adapters=None if start else adapters, bits=bits
            )
            self.critics[prefix] = Learner(model, of, steps * self.splits * self.critic_epochs)
        if "distillation" in self.program:
            self.teacher = Model(self.teacher_folder()).frozen()
        self.pool, self.costs = [], []
        self.multiplier = (self.config["cost"] or {}).get("multiplier")
        self.coefficient, self.kls = self.algorithm["kl_coefficient"], []
        self.updates = []

    def teacher_folder(self):
        return self.config["models"]["teacher"]["path"]

    def compare(self, name, found, expected, floor=FLOOR):
        found, expected = (torch.as_tensor(x).detach().double() for x in (found, expected))
        assert found.shape == expected.shape, f"{name}: {found.shape}, {expected.shape}"
        if found.numel():
            off = float(((found - expected).abs() / expected.abs().clamp(min=floor)).max())
            self.differences[name] = max(self.differences.get(name, 0.0), off)

    def compare_written(self, name, expected):
        """Compare with a metric of the step."""
        self.compare(name, self.metrics[self.number][name], expected, OF_KL)

    def run(self):
        """Every step, and the weights at the end; the largest relative differences by name."""
        for step in range(1, self.config["trainer"]["steps"] + 1):
            self.updates, self.number = [], step
            getattr(self, f"step_of_{self.program}")(self.rows_of(step))
            self.compare_metrics()
        self.compare_weights()
        return self.differences

    def rows_of(self, step):
        """The samples of a step, or of data the rows of a step, in the order of the file."""
        if self.given:
            return self.given_rows(step)
        name = f"step-{step:06d}.parquet"
        texts = pq.read_table(self.folder / "samples" / name).to_pylist()
        tokens = pq.read_table(self.folder / "tokens" / name).to_pylist()
        assert len(texts) == len(tokens), "a table of tokens has 64 samples at most"
        rows = [{**text, **ids} for text, ids in zip(texts, tokens, strict=True)]
        for row in rows:
            row["scores"] = math.nan if row["scores"] is None else row["scores"]
            row["mask"] = torch.tensor(row["response_mask"]).bool()
            if math.isnan(row["scores"]):
                row["mask"] = torch.zeros_like(row["mask"])
            with torch.no_grad():
                if any(self.config["rollout"][x] != none for x, none in WHOLE.items()):
                    row["kept"] = self.kept(row)
                row["old"] = self.log_probs(self.actor.model, row)
                row["rollout"] = self.log_probs(self.history[row["policy_version"]], row)
                row["ref"] = self.log_probs(self.reference, row)
            at = torch.tensor(row["response_mask"]).bool()
            for column, own in (("rollout_log_probs", "rollout"), ("log_probs", "old")):
                if row.get(column):
                    self.compare(column, torch.tensor(row[column])[at], row[own][at], floor=1.0)
            if row.get("ref_log_probs") and self.program != "distillation":
                found = torch.tensor(row["ref_log_probs"])[at]
                self.compare("ref_log_probs", found, row["ref"][at], floor=1.0)
        return rows

    def kept(self, row):
        """The tokens that each token of the response was chosen from."""
        rollout, sampled = self.config["rollout"], torch.tensor(row["response_mask"]).bool()
        of = self.history[row["policy_version"]].distributions(row, self.temperature)
        number = sampled.cumsum(0) - 1
        of[number < rollout["min_tokens"], self.tokenizer.eos_token_id] = -math.inf
        order = of.argsort(-1, descending=True)
        probs = of.gather(1, order).softmax(-1)
        if rollout["top_k"]:
            probs[:, rollout["top_k"] :] = 0
        probs /= probs.sum(-1, keepdim=True)
        probs[probs.cumsum(-1) - probs >= rollout["top_p"]] = 0
        probs[probs < rollout["min_p"] * probs[:, :1]] = 0
        found = torch.zeros_like(of, dtype=torch.bool).scatter(1, order, probs > 0)
        return found | ~sampled[:, None]

    def given_rows(self, step):
        """The tokens of what a step reads of the file of data."""
        lines = Path(self.config["data"]["path"]).read_text().splitlines()
        number, data = self.config["data"]["prompts_per_step"], list(map(json.loads, lines))
        ids = self.tokenizer
        chosen = [data[(number * (step - 1) + n) % len(data)] for n in range(number)]
        columns = ["chosen", "rejected"] if "chosen" in data[0] else ["response"]
        return [
            {
                "prompt_ids": ids(row["prompt"]).input_ids,
                "response_ids": (made := [*ids(row[column]).input_ids, ids.eos_token_id]),
                "mask": torch.ones(len(made)).bool(),
                "group_id": number * (step - 1) + place,
                "margin": row.get("margin", 0.0),
                "label": row.get("label"),
            }
            for place, row in enumerate(chosen)
            for column in columns
        ]

    def log_probs(self, model, row):
        return model.log_probs(row, self.temperature)[0]

    def parts(self, rows, sampled=(), epoch=0):
        """The rows of each mini-batch: whole groups, in an order drawn from the seed, from how
        many groups there were by then and from the epoch; `sampled` are all rows of the step, if
        it left some out."""
        if self.splits == 1:
            return [rows]
        groups = [row["group_id"] for row in rows]
        dealt = max(row["group_id"] for row in sampled or rows) + 1
        if self.program == "expert_iteration" or len(set(groups)) < self.splits:
            groups = list(range(len(rows)))
        different = sorted(set(groups))
        order = np.random.default_rng([self.config["run"]["seed"], 4, dealt, epoch])
        place = dict(zip(different, order.permutation(len(different)).tolist(), strict=True))
        edges = [len(different) * part // self.splits for part in range(self.splits + 1)]
        placed = [(place[group], row) for group, row in zip(groups, rows, strict=True)]
        return [[row for at, row in placed if a <= at < b] for a, b in pairwise(edges)]

    # What programs learn with.

    def token_rewards(self, row, score, coefficient):
        """The score on the last token, and the KL taken off every token."""
        found = torch.zeros(len(row["mask"])).double()
        if row["mask"].any():
            found[row["mask"].nonzero()[-1]] = score
        if self.algorithm["kl_in_reward"]:
            kind = self.algorithm["kl_estimator"] or "k1"
            found = found - coefficient * divergence(row["old"] - row["ref"], kind)
        return torch.where(row["mask"], found, 0.0)

    def note(self, tokens, **figures):
        self.updates.append({**figures, "tokens": tokens})

    def reinforce(self, part, *, old=True, towards="ref"):
        """An update of the policy on the rows of a mini-batch, which have `advantages`."""
        settings, flow = self.algorithm, self.config["placement"]
        masks = [row["mask"] for row in part]
        weights = token_weights(settings["aggregation"], masks, self.longest)
        stale = flow["staleness"] > 0 or flow["in_flight"] or settings["replay_share"] > 0
        anchored = settings["policy_loss"] in ("vespo", "dppo_tv", "dppo_kl")
        corrected = settings["correction"] in ("truncate", "mask", "kpop")
        own = settings["policy_loss"] in ("reinforce", "gspo")
        corrected |= settings["correction"] == "auto" and stale and own
        loss, sums, gaps = torch.zeros(()).double(), defaultdict(float), []
        if self.over:
            return self.leave_out()
        for row, mask, weight in zip(part, masks, weights, strict=True):
            if not mask.any():
                continue
            log_probs, entropy = self.actor.model.log_probs(row, self.temperature)
            begun = row["old"] if old else log_probs.detach()
            if old:
                gone = (begun - log_probs.detach())[mask]
                sums[STEP_KL] += float((torch.expm1(-gone) + gone).sum())
            base = row["rollout"] if (stale or anchored) and not corrected else begun
            token_loss = policy_loss(settings, log_probs, base, row["advantages"], mask)
            if corrected:
                token_loss = token_loss * correction(settings, begun, row["rollout"], mask)
            if (most := settings["negative_kl_max"]) is not None:
                far = (row["rollout"] - log_probs.detach())[mask].mean() > most
                token_loss = token_loss * ~(far & (row["advantages"] < 0))
            token_loss = token_loss - settings["entropy_coefficient"] * entropy
            if settings["kl_coefficient"] or towards != "ref":
                kind = settings["kl_estimator"] or "k3+"
                kl = divergence(log_probs - row[towards], kind)
                if towards == "ref" and not settings["kl_in_reward"]:
                    token_loss = token_loss + settings["kl_coefficient"] * kl
                sums["policy/kl"] += float(kl.detach()[mask].sum())
            loss = loss + weight * token_loss[mask].sum()
            sums["policy/entropy"] += float(entropy.detach()[mask].sum())
            gaps.append((row["rollout"] - begun)[mask].detach())
        tokens = sum(int(mask.sum()) for mask in masks)
        means = {name: total / max(1, tokens) for name, total in sums.items()}
        if self.most is not None and self.made and means[STEP_KL] > self.most:
            self.over = True
            self.compare_written("policy/step_kl_at_stop", means[STEP_KL])
            return self.leave_out()
        self.made += 1
        norm = self.actor.step(loss)
        means |= {"policy/loss": loss.item(), "policy/grad_norm": norm}
        self.note(tokens, **means, gaps=torch.cat(gaps) if gaps else torch.zeros(0))
        self.history.append(self.actor.model.frozen())

    def leave_out(self):
        """An update that is not made counts in the schedule and as a version."""
        self.actor.done += 1
        self.history.append(self.actor.model.frozen())

    def learn_values(self, part, prefix):
        """An update of a critic."""
        learner, clip = self.critics[prefix], self.config["critic"]["value_clip"]
        masks = [row["mask"] for row in part]
        loss = torch.zeros(()).double()
        weights = token_weights(self.algorithm["aggregation"], masks, self.longest)
        for row, mask, weight in zip(part, masks, weights, strict=True):
            values, old = learner.model.values(row), row[f"{prefix}own_values"]
            goal = row[f"{prefix}own_returns"]
            square = (values - goal).square()
            if clip is not None:
                near = torch.maximum(torch.minimum(values, old + clip), old - clip)
                square = torch.maximum(square, (near - goal).square())
            loss = loss + weight * 0.5 * square[mask].sum()
        norm, tokens = learner.step(loss), sum(int(mask.sum()) for mask in masks)
        name = f"{prefix}critic"
        self.note(tokens, **{f"{name}/loss": loss.item(), f"{name}/grad_norm": norm})

    def imitate(self, part, mode=None, scale=1.0):
        """A supervised update: at temperature 1, among all tokens, wherever the rows come from."""
        part = [{name: value for name, value in row.items() if name != "kept"} for row in part]
        masks = [row["mask"] for row in part]
        weights = token_weights(mode or self.algorithm["aggregation"], masks, self.longest)
        loss = torch.zeros(()).double()
        for row, mask, weight in zip(part, masks, weights, strict=True):
            loss = loss - scale * weight * self.actor.model.log_probs(row, 1.0)[0][mask].sum()
        norm = self.actor.step(loss)
        self.history.append(self.actor.model.frozen())
        return sum(int(m.sum()) for m in masks), {
            "policy/loss": loss.item(),
            "policy/grad_norm": norm,
        }

    def prefer(self, pairs):
        """An update on pairs of rows."""
        settings, loss, margins = self.config["preference"], torch.zeros(()).double(), []
        for row in pairs:
            with torch.no_grad():
                row["ref"] = self.log_probs(self.reference, row)
        compares = settings["loss"] in ("sigmoid", "ipo")
        for chosen, rejected in zip(pairs[0::2], pairs[1::2], strict=True):
            likely = [self.log_probs(self.actor.model, row) for row in (chosen, rejected)]
            gaps = [
                (x - row["ref"] if compares else x)[row["mask"]]
                for x, row in zip(likely, (chosen, rejected), strict=True)
            ]
            one, margin = pair_loss(settings, *gaps, likely[0][chosen["mask"]])
            loss = loss + one / (len(pairs) / 2)
            margins.append(margin)
        norm, tokens = self.actor.step(loss), sum(int(row["mask"].sum()) for row in pairs)
        self.history.append(self.actor.model.frozen())
        figures = {"policy/loss": loss.item(), "policy/grad_norm": norm}
        if margins:
            figures["pairs/margin"] = sum(margins) / len(margins)
        self.note(tokens, **figures)

    def taught(self, part):
        """An update towards a teacher's distributions."""
        masks = [row["mask"] for row in part]
        weights = token_weights(self.algorithm["aggregation"], masks, self.longest)
        loss, entropy = torch.zeros(()).double(), 0.0
        for row, mask, weight in zip(part, masks, weights, strict=True):
            student = self.actor.model.distributions(row, self.temperature)
            far = self.far(student, row)
            loss = loss + weight * far[mask].sum()
            entropy += float(
                self.actor.model.log_probs(row, self.temperature)[1].detach()[mask].sum()
            )
        norm, tokens = self.actor.step(loss), sum(int(mask.sum()) for mask in masks)
        self.history.append(self.actor.model.frozen())
        figures = {"policy/loss": loss.item(), "policy/grad_norm": norm}
        self.note(tokens, **figures, **{"policy/entropy": entropy / max(1, tokens)})

    def far(self, student, row):
        settings = self.config["distillation"]
        return distance(student, row["taught"], settings["loss"], settings["top_k"])

    def teach(self, row, temperature):
        """What the teacher says of a row."""
        row["taught"] = self.teacher.distributions(row, temperature)
        row["teacher"] = self.teacher.log_probs(row, temperature)[0]
        row["gain"] = row["teacher"] - row["rollout"] if "rollout" in row else None

    # The programs.

    def step_of_grpo(self, rows):
        settings = self.algorithm
        scores = [row["scores"] for row in rows]
        groups, masks = [row["group_id"] for row in rows], [row["mask"] for row in rows]
        kl = settings["kl_in_reward"]
        if settings["advantage"] == "reinforce_plus_plus":
            rewards = [
                self.token_rewards(row, 0.0 if math.isnan(s) else s, settings["kl_coefficient"])
                for row, s in zip(rows, scores, strict=True)
            ]
            returns = [to_go(r, m, settings["gamma"]) for r, m in zip(rewards, masks, strict=True)]
            found = whitened(returns, masks)
        else:
            if kl:
                kind = settings["kl_estimator"] or "k1"
                taken = [divergence(r["old"] - r["ref"], kind)[r["mask"]].sum() for r in rows]
                scores = [
                    s - settings["kl_coefficient"] * float(x)
                    for s, x in zip(scores, taken, strict=True)
                ]
            lengths = [int(m.sum()) for m in masks]
            if settings["advantage"] == "gdpo":
                weights = self.config["reward"]["weights"]
                names = ["reward/digits", "reward/short"]
                known = dict(zip(names, weights, strict=True))
                of_rows = decoupled(rows, groups, scores, known)
            else:
                of_rows = compared(settings, groups, scores, lengths)
            found = [a * torch.ones(len(m)).double() for a, m in zip(of_rows, masks, strict=True)]
            if settings["advantage"] == "reinforce_plus_plus_baseline":
                alone = {at[0] for at, _ in by_group(groups, scores) if len(at) == 1}
                found = whitened(found, masks)
                found = [a * (n not in alone) for n, a in enumerate(found)]
        self.credit(rows, found)
        self.learn(rows, old=self.splits * self.epochs > 1 or kl)

    def credit(self, rows, advantages):
        for row, found in zip(rows, advantages, strict=True):
            row["advantages"], own = torch.where(row["mask"], found, 0.0), row["advantages"]
            at = row["mask"]
            self.compare("advantages", torch.tensor(own)[at], row["advantages"][at], floor=1.0)

    def with_values(self, rows):
        for prefix, learner in self.critics.items():
            for row in rows:
                with torch.no_grad():
                    row[f"{prefix}own_values"] = learner.model.values(row)
                if not prefix:
                    at, given = row["mask"], torch.tensor(row["values"])
                    self.compare("values", given[at], row["own_values"][at], floor=1.0)

    def step_of_ppo(self, rows):
        settings = self.algorithm
        self.adapt()
        self.with_values(rows)
        masks, advantages = [row["mask"] for row in rows], []
        for row in rows:
            score = 0.0 if math.isnan(row["scores"]) else row["scores"]
            rewards = self.token_rewards(row, score, self.coefficient)
            found, row["own_returns"] = estimated(
                rewards, row["own_values"], row["mask"], settings["gamma"], settings["lam"]
            )
            advantages.append(found)
            at = row["mask"]
            given = torch.tensor(row["returns"])
            self.compare("returns", given[at], row["own_returns"][at], floor=1.0)
        self.credit(rows, whitened(advantages, masks))
        self.learn(rows)

    def learn(self, rows, **options):
        """Updates of critics and policy, and one of given answers."""
        self.over, self.made = False, 0
        for epoch in range(max(self.epochs, self.critic_epochs if self.critics else 0)):
            for part in self.parts(rows, epoch=epoch):
                for prefix in self.critics if epoch < self.critic_epochs else ():
                    self.learn_values(part, prefix)
                if epoch < self.epochs:
                    self.reinforce(part, **options)
        if self.most is not None:
            self.compare_written("policy/updates", self.made)
        if scale := self.algorithm["ptx_coefficient"]:
            self.imitate(self.examples(), "token-mean", scale)

    def examples(self):
        """Each prompt of the data with its answer: a step has them all."""
        files = (self.folder / "samples").glob("step-*.parquet")
        texts = {
            (r["prompt"], r["answer"]) for file in files for r in pq.read_table(file).to_pylist()
        }
        assert len(texts) == self.config["data"]["prompts_per_step"]
        ids = self.tokenizer
        return [
            {
                "prompt_ids": ids(prompt).input_ids,
                "response_ids": (made := [*ids(answer).input_ids, ids.eos_token_id]),
                "mask": torch.ones(len(made)).bool(),
            }
            for prompt, answer in sorted(texts)
        ]

    def adapt(self):
        """The coefficient of the KL after the updates of the step before."""
        settings = self.algorithm
        if settings["kl_target"] and self.kls:
            samples = self.config["data"]["prompts_per_step"]
            samples *= self.config["rollout"]["samples_per_prompt"]
            error = sum(self.kls) / len(self.kls) / settings["kl_target"] - 1
            error = min(max(error, -0.2), 0.2)
            self.coefficient *= 1 + error * samples / settings["kl_horizon"]
        found = self.metrics[self.number].get("policy/kl_coefficient", self.coefficient)
        self.compare("kl_coefficient", found, self.coefficient)

    def step_of_remax(self, rows):
        self.adapt()
        greedy, played = {}, self.config["rollout"]["episode"]
        for row in rows:
            if row["group_id"] not in greedy and not played:
                ids, ends = self.tokenizer, [self.tokenizer.eos_token_id]
                made = self.actor.model.greedy(row["prompt_ids"], self.longest, ends)
                text = ids.decode(made, skip_special_tokens=True)
                greedy[row["group_id"]] = self.rewarded(row["prompt"], text)
            baseline = greedy.get(row["group_id"])
            if played and row["mask"].any():  # what tools say to greedy answers is in no file
                rewards = self.token_rewards(row, row["scores"], self.coefficient)
                first = row["mask"].nonzero()[0]
                own = to_go(rewards, row["mask"], 1.0)[first] - row["advantages"][int(first)]
                baseline = greedy.setdefault(row["group_id"], float(own))
            if baseline is None or math.isnan(baseline) or math.isnan(row["scores"]):
                row["mask"] = torch.zeros_like(row["mask"])
        found = []
        for row in rows:
            score = 0.0 if math.isnan(row["scores"]) else row["scores"]
            rewards = self.token_rewards(row, score, self.coefficient)
            baseline = greedy.get(row["group_id"]) or 0.0
            found.append(to_go(rewards, row["mask"], 1.0) - baseline)
        self.credit(rows, found)
        self.learn(rows)

    def step_of_safe_rlhf(self, rows):
        settings, cost = self.algorithm, self.config["cost"]
        self.learn_multiplier(cost)
        self.costs.append([row["costs"] for row in rows])
        self.with_values(rows)
        for row in rows:
            if row["costs"] is None or math.isnan(row["costs"]):
                row["mask"] = torch.zeros_like(row["mask"])
        masks, both = [row["mask"] for row in rows], [[], []]
        half = settings["kl_coefficient"] / 2
        for row in rows:
            known = bool(row["mask"].any())
            of = (("", "scores", half), ("cost_", "costs", -half))
            for place, (prefix, column, coefficient) in enumerate(of):
                rewards = self.token_rewards(row, row[column] if known else 0.0, coefficient)
                found, row[f"{prefix}own_returns"] = estimated(
                    rewards,
                    row[f"{prefix}own_values"],
                    row["mask"],
                    settings["gamma"],
                    settings["lam"],
                )
                both[place].append(found)
        good, bad = (over_deviation(found, masks) for found in both)
        worth = self.multiplier
        found = [(g - worth * b) / (1 + worth) for g, b in zip(good, bad, strict=True)]
        self.credit(rows, found)
        self.learn(rows)

    def learn_multiplier(self, cost):
        """From the costs of the last four steps."""
        if self.costs:
            over = [
                torch.tensor([c - cost["limit"] for c in costs if c is not None]).double()
                for costs in self.costs[-4:]
            ]
            over = [x[~x.isnan()] for x in over]
            mean = sum(float(x.mean()) for x in over)
            scale = math.sqrt(len(over) * sum(float(x.square().mean()) for x in over))
            step = cost["multiplier_rate"] * mean / scale if scale else 0.0
            self.multiplier *= math.exp(step * min(self.multiplier, 1.0))
            self.multiplier = min(self.multiplier, cost["multiplier_max"])
        self.compare("multiplier", self.metrics[self.number]["cost/multiplier"], self.multiplier)

    def step_of_expert_iteration(self, rows):
        settings, kept = self.config["expert"], []
        if settings["choose"] == "right":
            seen = set()
            for row in rows:
                answer = (row["group_id"], row["response"])
                if row["scores"] >= self.config["reward"]["correct_at"] and answer not in seen:
                    seen.add(answer)
                    kept.append(row)
        else:
            scores = [row["scores"] for row in rows]
            for at, s in by_group([row["group_id"] for row in rows], scores):
                kept.append(rows[at[int(s.argmax())]])
        self.pool = [*self.pool, kept][-settings["steps_kept"] :]
        for part in self.parts([row for step in self.pool for row in step], rows):
            tokens, figures = self.imitate(part)
            self.note(tokens, **figures)

    def step_of_online_dpo(self, rows):
        pairs = []
        scores = [row["scores"] for row in rows]
        for at, s in by_group([row["group_id"] for row in rows], scores):
            if s.max() > s.min():
                pairs += [rows[at[int(s.argmax())]], rows[at[int(s.argmin())]]]
        self.prefer(pairs)

    def step_of_kto(self, rows):
        """Each prompt with the response of the row before it says how far the policy has moved."""
        settings, gaps = self.config["preference"], []
        for row, before in zip(rows, [rows[-1], *rows[:-1]], strict=True):
            with torch.no_grad():
                other = {**row, "response_ids": before["response_ids"]}
                models = (self.actor.model, self.reference)
                new, old = (self.log_probs(model, other) for model in models)
                gaps.append((new - old)[before["mask"]].sum())
                row["ref"] = self.log_probs(self.reference, row)
        z, loss, rewards = max(0.0, float(sum(gaps)) / len(rows)), torch.zeros(()).double(), 0.0
        for row in rows:
            gap = (self.log_probs(self.actor.model, row) - row["ref"])[row["mask"]].sum()
            ahead = settings["beta"] * (gap - z if row["label"] else z - gap)
            weight = settings["desirable_weight" if row["label"] else "undesirable_weight"]
            loss = loss + weight * (1 - torch.sigmoid(ahead)) / len(rows)
            rewards += settings["beta"] * gap.item() / len(rows)
        norm, tokens = self.actor.step(loss), sum(int(row["mask"].sum()) for row in rows)
        figures = {"labels/kl": z, "labels/reward": rewards}
        self.note(tokens, **{"policy/loss": loss.item(), "policy/grad_norm": norm}, **figures)

    def step_of_dpo(self, rows):
        self.prefer(rows)

    def step_of_reward_model(self, rows):
        settings, loss = self.config["preference"], torch.zeros(()).double()
        for chosen, rejected in zip(rows[0::2], rows[1::2], strict=True):
            better, worse = (self.actor.model.score(row) for row in (chosen, rejected))
            loss = loss - logsigmoid(better - worse - chosen["margin"]) / (len(rows) / 2)
            loss = loss + settings["centre"] * (better + worse) ** 2 / (len(rows) / 2)
        norm = self.actor.step(loss)
        tokens = sum(int(row["mask"].sum()) for row in rows)
        self.note(tokens, **{"policy/loss": loss.item(), "policy/grad_norm": norm})

    def step_of_sft(self, rows):
        for part in self.parts(rows):
            tokens, figures = self.imitate(part)
            self.note(tokens, **figures)

    def step_of_distillation(self, rows):
        sampled = self.config["distillation"]["loss"] == "sampled"
        with torch.no_grad():
            for row in rows:
                row["mask"] = torch.tensor(row["response_mask"]).bool()
                self.teach(row, self.temperature)
        if sampled:
            gains = [row["gain"] for row in rows]
            read = [row["mask"] & ~row["gain"].isnan() for row in rows]
            found = [x.nan_to_num(0.0) for x in whitened(gains, read)]
            self.credit(rows, found)
            self.learn(rows, old=self.splits * self.epochs > 1, towards="teacher")
            return
        for epoch in range(self.epochs):
            for part in self.parts(rows, epoch=epoch):
                self.taught(part)

    def step_of_offline_distillation(self, rows):
        with torch.no_grad():
            for row in rows:
                self.teach(row, 1.0)
        for part in self.parts(rows):
            self.taught(part)

    # What the run says of it.

    def compare_metrics(self):
        """Means over the updates of a step, by their tokens."""
        written = self.metrics[self.number]
        names = dict.fromkeys(n for update in self.updates for n in update if "/" in n)
        for name in names:
            found = [u for u in self.updates if name in u]
            weights = np.array([u["tokens"] for u in found], float)
            weights = weights if weights.sum() else np.ones(len(found))
            mean = float(np.average([u[name] for u in found], weights=weights))
            if name in written:
                self.compare(name, written[name], mean, OF_KL if name == STEP_KL else FLOOR)
        self.kls = [u["policy/kl"] for u in self.updates if "policy/kl" in u]
        gaps = next((u["gaps"] for u in self.updates if "gaps" in u), torch.zeros(0))
        if len(gaps) and "mismatch/k3" in written:
            x = (-gaps).exp()
            k3 = torch.exp(gaps.neg()) + gaps - 1
            self.compare("mismatch/kl", written["mismatch/kl"], gaps.mean())
            self.compare("mismatch/k3", written["mismatch/k3"], k3.mean())
            self.compare(
                "mismatch/max_abs", written["mismatch/max_abs"], gaps.abs().max(), floor=1.0
            )
            ess = x.sum() ** 2 / (len(x) * x.square().sum())
            self.compare("mismatch/ess", written["mismatch/ess"], ess)

    def compare_weights(self):
        """The norm of what is off, over the norm of all weights that learn."""
        learners = {"model": self.actor, **{f"{p}critic": c for p, c in self.critics.items()}}
        for folder, learner in learners.items():
            final = {
                name.removeprefix("base_model.model."): tensor.double()
                for name, tensor in weights_in(self.folder / folder).items()
            }
            mine = {name: tensor.detach() for name, tensor in learner.model.trained.items()}
            assert mine.keys() <= final.keys(), f"{folder}/: {final.keys()}"
            gaps = [(final[k] - mine[k])[~learner.vague[k]] for k in mine]
            off, size = (
                math.sqrt(sum(float(x.square().sum()) for x in tensors))
                for tensors in (gaps, mine.values())
            )
            left, whole = (sum(map(torch.numel, x)) for x in (gaps, mine.values()))
            assert left > 0.9 * whole, f"{folder}/: {left} of {whole} weights can be compared"
            name = "weights" if folder == "model" else f"{folder}/weights"
            self.differences[name] = off / size


def recompute(folder, rewarded=None):
    """The largest relative difference of each quantity of a run."""
    return Job(folder, rewarded).run()
