import subprocess
import sys

import pytest

from hybridrl.config.schema import RewardConfig
from hybridrl.errors import ConfigError
from hybridrl.rewards.loading import check_function_exists, load_reward_function, make_short_names
from hybridrl.rewards.source_pools import SourceRewardPools


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_importing_rewards_imports_nothing_heavy():
    code = (
        "import sys, hybridrl.rewards.reward_pool, hybridrl.rewards.reward_program\n"
        "import hybridrl.rewards.builtin_rewards\n"
        "heavy = {'torch', 'sympy', 'ray', 'numpy', 'pyarrow', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, result.stderr


def test_file_and_its_neighbours(tmp_path):
    write(tmp_path / "reward_neighbour.py", "VALUE = 4.0\n")
    path = write(
        tmp_path / "mine.py",
        "from reward_neighbour import VALUE\ndef score(**row): return VALUE\n",
    )
    check_function_exists(f"{path}:score")
    assert load_reward_function(f"{path}:score")() == 4.0


def test_module_is_found_without_importing_its_package(tmp_path, monkeypatch):
    write(tmp_path / "reward_package" / "__init__.py", "raise RuntimeError('imported')")
    write(tmp_path / "reward_package" / "inner.py", "def score(**row): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_function_exists("reward_package.inner:score")
    with pytest.raises(ConfigError, match=r"Did you mean `score`"):
        check_function_exists("reward_package.inner:scores")
    with pytest.raises(ConfigError, match="RuntimeError: imported"):
        load_reward_function("reward_package.inner:score")


def test_builtin():
    check_function_exists("exact")
    assert load_reward_function("exact")("", "a", "a") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "def score(): ...",
        "async def score(): ...",
        "class score: ...",
        "from math import sqrt as score",
        "score = other = 1",
        "import math\nif math:\n    score = 1",
        "try:\n    pass\nexcept ValueError:\n    pass\nelse:\n    def score(): ...",
        "from math import *",
        "def __getattr__(name): ...",
    ],
)
def test_a_name_can_be_defined_in_many_ways(tmp_path, text):
    check_function_exists(f"{write(tmp_path / 'mine.py', text)}:score")


def test_what_a_check_refuses(tmp_path):
    path = write(tmp_path / "mine.py", "def scores(**row):\n    score = 1\n")
    with pytest.raises(ConfigError, match=r"defines no `score`; it defines scores. Did you mean"):
        check_function_exists(f"{path}:score")
    with pytest.raises(ConfigError, match=r"there is no file .*Did you mean `mine.py`"):
        check_function_exists(f"{tmp_path}/mime.py:score")
    with pytest.raises(ConfigError, match="no valid Python"):
        check_function_exists(f"{write(tmp_path / 'broken.py', 'def (')}:score")
    with pytest.raises(ConfigError, match=r"there is no module `absent_package`"):
        check_function_exists("absent_package.inner:score")
    with pytest.raises(ConfigError, match=r"there is no module `json.absent`"):
        check_function_exists("json.absent:score")
    with pytest.raises(ConfigError, match=r"no built-in .*Did you mean `exact`"):
        check_function_exists("exactly")
    with pytest.raises(ConfigError, match=r"write `.*mine.py:score`"):
        check_function_exists(str(path))


def test_what_loading_refuses(tmp_path):
    with pytest.raises(ConfigError, match=r"is 1 \(int\) and cannot be called"):
        load_reward_function(f"{write(tmp_path / 'number.py', 'score = 1')}:score")
    with pytest.raises(ConfigError, match="SystemExit"):
        load_reward_function(
            f"{write(tmp_path / 'leaves.py', 'exit(3)' + chr(10) + 'score = 1')}:score"
        )
    with pytest.raises(ConfigError, match=r"defines no `score`"):
        load_reward_function(f"{write(tmp_path / 'star.py', 'from math import *')}:score")


def test_short_names_are_distinct():
    specs = ["a/one.py:score", "two:score", "exact", "b/one.py:score"]
    assert make_short_names(specs) == ["one.score", "two.score", "exact", "one.score#2"]
    assert make_short_names(["exact", "exact"]) == ["exact", "exact#2"]


def test_functions_without_a_number_of_processes_get_one(monkeypatch):
    started = []

    class Processes:
        def __init__(self, spec, most, at_once):
            started.append(most)

        def start(self, number):
            started.append(number)

    monkeypatch.setattr("hybridrl.rewards.reward_pool.ProcessPool", Processes)
    assert SourceRewardPools({None: RewardConfig(function="exact", processes=None)})
    assert started == [1, 1]
