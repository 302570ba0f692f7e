"""Model folders that cannot be trained, or cannot score, and some that can."""

from __future__ import annotations

import atexit
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from campaigns.campaign import WORKS, Case
from published_models import PUBLISHED, publish
from safetensors.torch import load_file, save_file

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.models.model_loading import make_tiny_model

JOB = ["executor=inline", "rollout=transformers", "trainer.steps=1", "eval.prompts=4"]
JOB += ["data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=4"]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
BERT = {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}
OLD_SHAPE = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
"""As configurations of the time of GPT-2 call it."""
Change = Callable[[Path], object]


def temporary() -> Path:
    """A folder that is gone with this process."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def base() -> Path:
    """A sound folder, made once: a tiny Qwen2 and its tokenizer."""
    folder = temporary()
    make_tiny_model(
        folder, build_character_tokenizer(), seed=0, hidden_size=32, layers=2, heads=2, context=64
    )
    return folder


def changed(change: Change, *overrides: str) -> Callable[[Path], list[str]]:
    """A job that trains on a sound folder after a change."""

    def make(folder: Path) -> list[str]:
        model = shutil.copytree(base(), folder / "model")
        change(model)
        return [*JOB, *data(folder), f"model.path={model}", *overrides]

    return make


def data(folder: Path) -> list[str]:
    """Rows that the tokenizer knows."""
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(20)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return ["data=jsonl", f"data.path={folder / 'rows.jsonl'}"]


def named(path: str, *overrides: str) -> Callable[[Path], list[str]]:
    """A job with this `model.path`."""
    return lambda folder: [*JOB, *data(folder), f"model.path={path}", *overrides]


def beside(setting: str, change: Change, *overrides: str) -> Callable[[Path], list[str]]:
    """A job of a sound policy, and another model in this setting."""

    def make(folder: Path) -> list[str]:
        other = shutil.copytree(base(), folder / "other")
        change(other)
        policy = [*JOB, *data(folder), f"model.path={base()}"]
        return [*policy, f"{setting}={other}", *overrides]

    return make


def published(name: str, *overrides: str) -> Callable[[Path], list[str]]:
    """A job that trains a model of a published class."""

    def make(folder: Path) -> list[str]:
        model = publish(folder / "model", name)
        return [
            *JOB,
            *data(folder),
            "data.max_prompt_tokens=128",
            f"model.path={model}",
            *overrides,
        ]

    return make


def also(*changes: Change) -> Change:
    """One change after the other."""
    return lambda folder: [change(folder) for change in changes]


def sound(_: Path) -> None:
    """No change."""


def settings(**values: Any) -> Change:
    """Changes config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        kept = json.loads(file.read_text())
        for name in [name for name, value in values.items() if value is None]:
            kept.pop(name, None)
        kept.update({name: value for name, value in values.items() if value is not None})
        file.write_text(json.dumps(kept))

    return change


def deeper(folder: Path) -> None:
    """Layers that the files have not."""
    settings(num_hidden_layers=4, layer_types=None, max_window_layers=4)(folder)


def written(name: str, content: str | bytes) -> Change:
    """Another file in place of one."""

    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def without(*names: str) -> Change:
    """Without these files."""

    def change(folder: Path) -> None:
        for name in names:
            for file in folder.glob(name):
                file.unlink()

    return change


def cut(share: float) -> Change:
    """Weights of which the end is missing."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])

    return change


def tensors(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """Weights after a change."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        found = load_file(file)
        edit(found)
        save_file(found, file, {"format": "pt"})

    return change


def renamed(found: dict[str, torch.Tensor]) -> None:
    """Every tensor under a name of somebody else's."""
    for name in list(found):
        found["module." + name.replace("model.", "core.")] = found.pop(name)


def widened(found: dict[str, torch.Tensor]) -> None:
    """One matrix of another shape."""
    name = "model.layers.0.mlp.up_proj.weight"
    found[name] = torch.cat([found[name], found[name]])


def fewer_tokens(folder: Path) -> None:
    """An embedding smaller than the tokenizer's vocabulary."""
    settings(vocab_size=30)(folder)
    tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:30]}))(
        folder
    )


def classify(labels: int) -> Change:
    """A classifier instead."""

    def change(folder: Path) -> None:
        kind = transformers.AutoModelForSequenceClassification
        with torch.random.fork_rng():
            kind.from_pretrained(folder, num_labels=labels).save_pretrained(folder)

    return change


def replaced(config: str, model: str, **shape: Any) -> Change:
    """A model of another class, with the same tokenizer."""

    def change(folder: Path) -> None:
        without("*.safetensors", "config.json", "generation_config.json")(folder)
        made = getattr(transformers, model)(getattr(transformers, config)(**shape))
        made.save_pretrained(folder)

    return change


def header_of(size: int, text: bytes = b"") -> bytes:
    """The beginning of a safetensors file."""
    return struct.pack("<Q", size) + text


def split(drop: str) -> Change:
    """Two files with an index, one of them removed."""

    def change(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(found)
        parts = [names[: len(names) // 2], names[len(names) // 2 :]]
        index = {}
        for number, part in enumerate(parts, start=1):
            file = f"model-{number:05}-of-00002.safetensors"
            save_file({n: found[n] for n in part}, folder / file, {"format": "pt"})
            index |= dict.fromkeys(part, file)
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
        for file in folder.glob(drop):
            file.unlink()

    return change


def tokenizer(**values: Any) -> Change:
    """Changes tokenizer_config.json, and what tokenizer.json says besides."""

    def change(folder: Path) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def larger_tokenizer(folder: Path) -> None:
    """One with more characters than the model was made for."""
    build_character_tokenizer(
        build_character_tokenizer.__defaults__[0] + "ABCDEFGHIJ"
    ).save_pretrained(folder)


def padded_tokenizer(folder: Path) -> None:
    """A token for padding beyond the model's rows, as many fine-tuned folders have."""
    made = build_character_tokenizer()
    made.add_special_tokens({"pad_token": "[PAD]"})
    made.save_pretrained(folder)


def no_end(folder: Path) -> None:
    """Neither tokenizer nor generation_config.json name a token that ends a response."""
    made = build_character_tokenizer()
    made.eos_token = None
    made.save_pretrained(folder)
    without("generation_config.json")(folder)
    settings(eos_token_id=None)(folder)


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:0123456789abcdef\nsize 123456789\n"
)
CUSTOM = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM", "AutoConfig": "c.MineConfig"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
DIVERGENT = "would be off by|cannot be trained here"

CASES = [
    Case("sound", changed(sound), WORKS),
    Case("in two files", changed(split("nothing")), WORKS),
    Case("a token for padding that the model has not", changed(padded_tokenizer), WORKS),
    Case(
        "adapters beside no module",
        changed(sound, "actor.lora.rank=4", "actor.lora.targets=[q_proj,nope]", "warmup.steps=0"),
        "actor.lora.targets=.*no module `nope`; its linear layers are",
    ),
    # Classes as they are published
    *(Case(f"{name}, as published", published(name), WORKS) for name in PUBLISHED),
    Case(
        "a critic of a class without a scalar head",
        published("mistral3", "algorithm=ppo"),
        "cannot be a critic or a reward model: .*`mistral3`",
    ),
    # config.json
    Case("no config.json", changed(without("config.json")), "has no config.json"),
    Case("config.json is empty", changed(written("config.json", "")), "config.json could not be"),
    Case("config.json is a list", changed(written("config.json", "[1]")), "holds no object"),
    Case("config.json cut short", changed(written("config.json", '{"model_')), "could not be read"),
    Case("config.json in UTF-16", changed(written("config.json", "{}".encode("utf-16"))), "read"),
    Case("config.json without a type", changed(settings(model_type=None)), "no `model_type`"),
    Case("a type that nobody has", changed(settings(model_type="qwen22")), "qwen22.*mean `qwen2"),
    Case(
        "a model of custom code",
        changed(settings(model_type="mine", auto_map=CUSTOM)),
        "Python code of its own",
    ),
    Case("GPTQ", changed(settings(quantization_config=GPTQ)), r"quantised \(gptq\)"),
    Case(
        "bitsandbytes",
        changed(settings(quantization_config={"quant_method": "bitsandbytes"})),
        r"quantised \(bitsandbytes\)",
    ),
    Case("quantised by nobody", changed(settings(quantization_config={})), "quantised"),
    Case("heads that are text", changed(settings(num_attention_heads="two")), "model.path"),
    Case("no heads", changed(settings(num_attention_heads=0)), "model.path"),
    # Weights
    Case("no weights", changed(without("*.safetensors")), "no weights"),
    Case("weights cut short by a tenth", changed(cut(0.9)), "damaged: it should have"),
    Case("weights cut short in the header", changed(cut(0.001)), "damaged"),
    Case("weights of no bytes", changed(cut(0)), "damaged"),
    Case("weights that are a pointer", changed(written("model.safetensors", POINTER)), "git-LFS"),
    Case(
        "old weights that are a pointer",
        changed(
            lambda f: (
                cut(0)(f),
                without("*.safetensors")(f),
                written("pytorch_model.bin", POINTER)(f),
            )
        ),
        "git-LFS",
    ),
    Case(
        "old weights that are none",
        changed(also(without("*.safetensors"), written("pytorch_model.bin", "no"))),
        "no whole file of torch",
    ),
    Case("weights that are text", changed(written("model.safetensors", "<html>")), "damaged"),
    Case(
        "weights with a wild header",
        changed(written("model.safetensors", header_of(9, b"{not json"))),
        "damaged",
    ),
    Case("weights of other names", changed(tensors(renamed)), "lack .* tensors.*They have `module"),
    Case("weights of another shape", changed(tensors(widened)), "up_proj.weight.*has the shape"),
    Case(
        "a config.json of another width", changed(settings(intermediate_size=80)), "has the shape"
    ),
    Case("a config.json with more layers", changed(deeper), r"lack 24 of .*layers\.2"),
    Case(
        "a tensor is missing",
        changed(tensors(lambda t: t.pop("model.norm.weight"))),
        r"lack 1 of .*model\.norm\.weight",
    ),
    Case("one file of two is missing", changed(split("*00002-of*")), "1 of 2 files are missing"),
    Case("no index beside two files", changed(split("*.index.json")), "which is written last"),
    Case(
        "an index that is none",
        changed(
            lambda f: (
                split("")(f) if 0 else split("nothing")(f),
                written("model.safetensors.index.json", "{}")(f),
            )
        ),
        "does not say which tensor",
    ),
    # Classes
    Case("a classifier", changed(classify(1)), "Qwen2ForSequenceClassification.*causal language"),
    Case(
        "BERT",
        changed(replaced("BertConfig", "BertForMaskedLM", **BERT)),
        "BertForMaskedLM.*causal language",
    ),
    Case(
        "BART",
        changed(
            replaced(
                "BartConfig",
                "BartForConditionalGeneration",
                vocab_size=64,
                d_model=32,
                encoder_layers=1,
                decoder_layers=1,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=32,
                decoder_ffn_dim=32,
            )
        ),
        "encoder-decoder",
    ),
    Case(
        "T5",
        changed(
            replaced(
                "T5Config",
                "T5ForConditionalGeneration",
                vocab_size=64,
                d_model=32,
                d_kv=16,
                d_ff=32,
                num_layers=1,
                num_heads=2,
            )
        ),
        "encoder-decoder",
    ),
    Case("GPT-2", changed(replaced("GPT2Config", "GPT2LMHeadModel", **OLD_SHAPE)), WORKS),
    Case(
        "OPT",
        changed(
            replaced(
                "OPTConfig",
                "OPTForCausalLM",
                vocab_size=64,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                word_embed_proj_dim=32,
            )
        ),
        DIVERGENT,
    ),
    Case(
        "Mamba",
        changed(
            replaced(
                "MambaConfig",
                "MambaForCausalLM",
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
                state_size=4,
            )
        ),
        "no attention heads",
    ),
    Case(
        "RWKV",
        changed(
            replaced(
                "RwkvConfig",
                "RwkvForCausalLM",
                vocab_size=64,
                hidden_size=32,
                num_hidden_layers=2,
            )
        ),
        "no attention heads",
    ),
    Case(
        "BLOOM",
        changed(
            replaced(
                "BloomConfig",
                "BloomForCausalLM",
                vocab_size=64,
                hidden_size=32,
                n_layer=2,
                n_head=2,
            )
        ),
        DIVERGENT,
    ),
    Case(
        "a model of pictures",
        changed(
            replaced(
                "ViTConfig",
                "ViTForImageClassification",
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=32,
            )
        ),
        "causal language model",
    ),
    Case(
        "a body without a head", changed(replaced("LlamaConfig", "LlamaModel", **SHAPE)), "lm_head"
    ),
    # Tokenizers
    Case("no tokenizer", changed(without("tok*", "vocab*", "merges*")), "tokenizer"),
    Case("no vocabulary", changed(without("tokenizer.json", "vocab*")), "vocabulary|tokenizer"),
    Case("a broken tokenizer", changed(written("tokenizer.json", "{")), "No tokenizer could be"),
    Case("no end of sequence", changed(no_end), "no end-of-sequence token"),
    Case("a larger tokenizer", changed(larger_tokenizer), "never seen"),
    Case("fewer rows than tokens", changed(fewer_tokens), "never seen"),
    Case(
        "a tokenizer elsewhere that is none",
        changed(sound, "model.tokenizer=/nowhere/tokenizer"),
        "model.tokenizer=/nowhere/tokenizer",
    ),
    # Places
    Case("no such folder", named("/nowhere/model"), "no such folder"),
    Case("no such folder, near", named("./modell"), "no such folder"),
    Case("a name without end", named("a" * 5000), "model.path.*at most 255 bytes"),
    Case("a path without end", named("/tmp/" + "a/" * 5000), "model.path.*must be"),
    Case("a home that is another", named("~/nowhere/model"), "no such folder"),
    Case("a file", lambda f: named(str(written("m.txt", "x")(f) or f / "m.txt"))(f), "is a file"),
    Case("a misspelt hub name", named("Qwen/Qwen2.5-0.5B-Instructt"), "no such folder.*hub"),
    Case("a name of one word", named("nope"), "no such folder .*hub"),
    Case("a name that can be none", named("my model"), "no such folder.*hub"),
    Case("adapters", changed(written("adapter_config.json", "{}")), "adapters of a LoRA run"),
    # Models beside the policy
    Case("a reward model", beside("reward.model", classify(1), "reward.function=[]"), WORKS),
    Case("a reward model that is none", beside("reward.model", sound), "without a scalar head"),
    Case("a reward model of two labels", beside("reward.model", classify(2)), "into 2 labels"),
    Case("a reward model cut short", beside("reward.model", cut(0.9)), "damaged"),
    Case(
        "BERT as reward model",
        beside(
            "reward.model",
            replaced(
                "BertConfig",
                "BertForSequenceClassification",
                num_labels=1,
                **BERT,
            ),
        ),
        "scalar head is not `score`",
    ),
    Case("no such reward model", beside("reward.model", sound, "reward.model=/nowhere"), "no such"),
    Case("a critic of its own", beside("models.critic.path", sound, "algorithm=ppo"), WORKS),
    Case(
        "a critic with layers missing",
        beside("models.critic.path", deeper, "algorithm=ppo"),
        "models.critic.path=.*lack",
    ),
    Case(
        "a classifier as reference",
        beside("models.reference.path", classify(1), "algorithm.kl_coefficient=0.1"),
        "models.reference.path=.*causal language",
    ),
    Case("no such judge", changed(sound, "reward.judge.path=/nowhere"), "reward.judge.path=/nowh"),
    Case("a judge without weights", beside("reward.judge.path", cut(0)), "damaged"),
]
