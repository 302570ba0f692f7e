import pytest
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks import list_tasks, load_task
from hybridrl.errors import ConfigError, DataError


def test_arithmetic_has_every_problem_once_and_right():
    train, held_out = load_task("arithmetic").problems(count_held_out=256, seed=3)
    assert (len(train), len(held_out)) == (1344, 256)
    everything = {row["prompt"]: row["answer"] for row in train + held_out}
    assert everything == {f"{a}+{b}=": str(a + b) for a in range(40) for b in range(40)}


def test_arithmetic_depends_on_the_seed_only():
    problems = load_task("arithmetic").problems
    assert problems(100, seed=1) == problems(100, seed=1)
    assert problems(100, seed=1) != problems(100, seed=2)


def test_arithmetic_refuses_to_hold_out_everything():
    with pytest.raises(ConfigError, match="1600"):
        load_task("arithmetic").problems(count_held_out=1_600)


def near(row):
    """Whether the rejected answer is off by one or ten, or has the digits swapped."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not rejected.isdigit() or str(int(rejected)) != rejected:
        return rejected == chosen[::-1]
    return abs(int(chosen) - int(rejected)) in (1, 10) or rejected == chosen[::-1]


def test_arithmetic_pairs_are_right_and_worse():
    arithmetic = load_task("arithmetic")
    parts = arithmetic.pairs(100, seed=1)
    assert parts == arithmetic.pairs(100, seed=1)
    prompts = [{row["prompt"] for row in part} for part in parts]
    assert (len(prompts[0]), len(prompts[1]), len(parts[1])) == (1500, 100, 100)
    assert not prompts[0] & prompts[1]
    for row in parts[0] + parts[1]:
        left, right = row["prompt"].rstrip("=").split("+")
        assert int(row["chosen"]) == int(left) + int(right)
        assert row["rejected"] != row["chosen"] and len(row["rejected"]) <= 7
        assert set(row["rejected"]) <= set(arithmetic.CHARACTERS)
    assert all(near(row) for row in parts[1])


def test_arithmetic_pairs_reject_what_a_policy_finds():
    rows = load_task("arithmetic").pairs(100, seed=1)[0]
    others = [(row["chosen"], row["rejected"]) for row in rows if not near(row)]
    assert sum(wrong == "" for _, wrong in others) > 200
    assert sum(wrong == right[:-1] != "" for right, wrong in others) > 200
    assert sum(wrong.startswith(right) for right, wrong in others) > 200
    assert sum("+" in wrong or "=" in wrong for _, wrong in others) > 200
    assert len({wrong for _, wrong in others if wrong.isdigit() and len(wrong) == 2}) > 60
    assert len(others) < len(rows) / 2, "most are the hard ones"


def test_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError, match=r"`arithmetics`.*Did you mean `arithmetic`"):
        load_task("arithmetics")
    assert list_tasks() == ["arithmetic", "calculator", "reasoning_gym"]


def test_a_task_may_be_any_importable_module(tmp_path, monkeypatch):
    (tmp_path / "my_tasks").mkdir()
    (tmp_path / "my_tasks" / "echo.py").write_text(
        "CHARACTERS = 'ab'\ndef problems(count_held_out, seed): return [], []\n"
    )
    (tmp_path / "my_tasks" / "empty.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_task("my_tasks.echo").CHARACTERS == "ab"
    with pytest.raises(ConfigError, match=r"no `CHARACTERS` and no `problems`"):
        load_task("my_tasks.empty")
    with pytest.raises(ConfigError, match="importing that module failed"):
        load_task("my_tasks.absent")


@pytest.mark.parametrize("config", [None, LlamaConfig, Qwen2Config, Qwen3Config])
def test_character_tokenizer_survives_a_saved_folder(tmp_path, config):
    text = " 17 + 58 = 75 , (a  b). "
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    if config is not None:  # AutoTokenizer chooses its class by the model in the folder
        config().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert loaded(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == loaded.decode(ids) == text
    assert len(loaded) == len(tokenizer) < 64
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)
    assert loaded.decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_character_tokenizer_of_a_task():
    tokenizer = build_character_tokenizer(load_task("arithmetic").CHARACTERS)
    assert tokenizer("1+1=")["input_ids"] == [4, 13, 4, 14]
    assert tokenizer("1x1")["input_ids"] == [4, tokenizer.unk_token_id, 4]


def test_character_tokenizer_refuses_what_is_no_single_token():
    with pytest.raises(DataError, match="'é'"):
        build_character_tokenizer("aé")
    with pytest.raises(DataError, match="repeated"):
        build_character_tokenizer("aa")
