"""Reward functions and what is said of them: wrong ones, and shapes of several libraries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from campaigns.campaign import WORKS, Case
from campaigns.data import GOOD, NESTED, lines

Make = Callable[[Path], list[str]]


def spec(*overrides: str) -> Make:
    """A job with these settings; `@` stands for its folder."""
    return lines(*ROWS, overrides=overrides)


def mine(code: str, *overrides: str, name: str = "score") -> Make:
    """A job with a function from a file of the user's."""

    def make(folder: Path) -> list[str]:
        (folder / "mine.py").write_text(code)
        return spec(f"reward.function={folder}/mine.py:{name}", *overrides)(folder)

    return make


def body(statement: str, *overrides: str) -> Make:
    """A function of the usual parameters that does this."""
    return mine(
        f"import math\ndef score(prompt, response, answer, **row):\n    {statement}\n", *overrides
    )


def batch(statement: str, *overrides: str) -> Make:
    """A function of TRL's shape that does this."""
    return mine(f"def score(completions, **columns):\n    {statement}\n", *overrides)


def verls(code: str) -> Make:
    """A job of verl's rows and reward."""

    def make(folder: Path) -> list[str]:
        rows = [{**row, "data_source": "sums"} for row in NESTED]
        (folder / "mine.py").write_text(code)
        function = f"reward.function={folder}/mine.py:compute_score"
        inner = "data.answer_column=reward_model.ground_truth"
        return lines(*rows, overrides=(inner, function))(folder)

    return make


ROWS = [{"prompt": row["prompt"], "answer": row["answer"]} for row in GOOD]
VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {}\n"
SCORE = "def score(prompt, response, answer, **row): return 1.0\n"
LIMIT = "reward.options.length.limit=4"
JUDGE = "reward.judge.path=/nowhere/judge"

CASES = [
    # Names
    Case("exact", spec("reward.function=exact"), WORKS),
    Case("several", spec("reward.function=[exact,contains]", "reward.weights=[1,0.5]"), WORKS),
    Case("a misspelt name", spec("reward.function=exakt"), "Did you mean `exact`"),
    Case("no name", spec("reward.function=''"), "reward.function"),
    Case("a number", spec("reward.function=5"), "reward.function.*5"),
    Case("none at all", spec("reward.function=[]"), "`reward.function` is empty"),
    Case("null", spec("reward.function=null"), "reward.function"),
    Case(
        "a list with a number",
        spec("reward.function=[exact,3]"),
        "must be a name or a list of names",
    ),
    Case(
        "a list in a list", spec("reward.function=[[exact]]"), "must be a name or a list of names"
    ),
    Case("a group", spec("reward.function={exact: 1}"), "reward.function"),
    Case("no such file", spec("reward.function=/nowhere/mine.py:score"), "there is no file"),
    Case(
        "a file without a name", spec("reward.function=/nowhere/mine.py"), "write `.*mine.py:score`"
    ),
    Case("a file without end", spec(f"reward.function={'a' * 5000}.py:score"), "255 bytes"),
    Case("no such module", spec("reward.function=absent.inner:score"), "no module `absent"),
    Case("a misspelt function", mine(SCORE, name="scor"), "defines no `scor`.*mean `score`"),
    Case("a file that is no Python", mine("def ("), "no valid Python"),
    Case("a file of nothing", mine(""), "defines no `score`; it defines nothing"),
    Case("a file of bytes", mine("x = '\0'"), "no valid Python"),
    # What the name stands for
    Case("a number instead", mine("score = 1"), "is 1 .int. and cannot be called"),
    Case("a module instead", mine("import math as score"), ".module. and cannot be called"),
    Case(
        "a class instead", mine("class score:\n    def __init__(self, response): pass"), "no number"
    ),
    Case(
        "an object that is called",
        mine("class S:\n    def __call__(self, response, **row): return 1.0\nscore = S()"),
        WORKS,
    ),
    Case(
        "an object that is not called",
        mine("class S: pass\nscore = S()"),
        ".S. and cannot be called",
    ),
    Case("a lambda", mine("score = lambda response, **row: 1.0"), WORKS),
    Case(
        "a lambda of other names", mine("score = lambda text: 1.0"), "no parameter for the response"
    ),
    Case(
        "a partial",
        mine(
            "from functools import partial\ndef f(k, response, **row): return k\n"
            "score = partial(f, 1.0)"
        ),
        WORKS,
    ),
    Case(
        "a decorated function",
        mine("import functools\n@functools.cache\ndef score(response): return 1.0"),
        WORKS,
    ),
    Case(
        "an import that fails",
        mine("import absent_package\n" + SCORE),
        "importing it raised ModuleNotFoundError",
    ),
    Case("an import that leaves", mine("exit(3)\n" + SCORE), "importing it raised SystemExit"),
    # Parameters
    Case("no parameters", mine("def score(): return 1.0"), "no parameter for the response"),
    Case("the prompt only", mine("def score(prompt): return 1.0"), "no parameter for the response"),
    Case("by position only", mine("def score(response, /): return 1.0"), "by position only"),
    Case("any by position", mine("def score(*args): return 1.0"), "no parameter for the response"),
    Case(
        "TRL's of one row",
        mine("def score(completion, **kw): return 1.0"),
        "needs `completion` .`completion` is called `response`",
    ),
    Case(
        "TRL's without the rest",
        mine("def score(completion, ground_truth): return 1.0"),
        "`completion` is called `response` here",
    ),
    Case("TRL's", batch("return [1.0] * len(completions)"), WORKS),
    Case(
        "TRL's with a column",
        mine("def score(completions, level): return [1.0]"),
        "needs `level`, and a row has prompts, completions, answer",
    ),
    Case("verl's", verls(VERL.format("return 1.0")), WORKS, runs=True, timeout_s=90),
    Case(
        "verl's on other rows",
        mine("def score(data_source, solution_str, ground_truth): return 1.0"),
        "needs `data_source`",
    ),
    Case(
        "OpenRLHF's",
        mine("def score(queries, prompts, labels): return 1.0"),
        "no parameter for the response",
    ),
    Case(
        "a column that is not there",
        mine("def score(response, level): return 1.0"),
        "needs `level`, and a row has prompt, response, answer",
    ),
    Case(
        "a column that is near",
        mine("def score(response, promt): return 1.0"),
        "Did you mean `prompt`",
    ),
    Case(
        "another name of the answer",
        mine("def score(response, ground_truth): return 1.0"),
        "`ground_truth` is called `answer` here",
    ),
    Case("a column with a default", mine("def score(response, level=1): return 1.0"), WORKS),
    Case("a column by keyword", mine("def score(*, response, level): return 1.0"), "needs `level`"),
    Case("a column in the row", body("return row['level']"), "KeyError: 'level'"),
    # Options
    Case(
        "an option",
        mine("def score(response, scale=1.0): return scale", "reward.options.score.scale=2.0"),
        WORKS,
    ),
    Case(
        "an option that is needed",
        mine("def score(response, scale): return scale", "reward.options.score.scale=2.0"),
        WORKS,
    ),
    Case("an option of nobody", spec("reward.options.exakt.scale=2"), "names no `exakt`"),
    Case(
        "a misspelt option",
        mine("def score(response, scale=1.0): return 1.0", "reward.options.score.scal=2"),
        "Did you mean `scale`",
    ),
    Case(
        "an option for the row",
        mine("def score(response, **row): return 1.0", "reward.options.score.scale=2"),
        "no parameter `scale`",
    ),
    Case("options that are none", spec("reward.options.exact=5"), "reward.options.exact"),
    Case("an option of exact", spec("reward.options.exact.case=true"), "no parameter `case`"),
    Case(
        "format without a pattern",
        spec("reward.function=format"),
        "reward.options.format.pattern=<value>",
    ),
    Case(
        "format with a bad pattern",
        spec("reward.function=format", "reward.options.format.pattern='('"),
        "no regular expression",
    ),
    Case(
        "format with a number",
        spec("reward.function=format", "reward.options.format.pattern=5"),
        "no regular expression",
    ),
    Case(
        "length without a limit",
        spec("reward.function=length"),
        "reward.options.length.limit=<value>",
    ),
    Case(
        "length of text",
        spec("reward.function=length", "reward.options.length.limit=long"),
        "reward.options.length.limit",
    ),
    # Weights
    Case(
        "a weight too many", spec("reward.weights=[1,2]"), "2 entries and `reward.function` has 1"
    ),
    Case("weights of nothing", spec("reward.weights=[0]"), "every response would score 0"),
    Case("a weight that is text", spec("reward.weights=[a]"), "reward.weights"),
    Case("a weight that is NaN", spec("reward.weights=[nan]"), "finite"),
    # What it returns
    Case("nothing", body("pass"), "returned None .NoneType., which is no number"),
    Case("text", body("return 'good'"), "returned 'good' .str., which is no number"),
    Case("NaN", body("return math.nan"), "returned nan, and a score must be a finite"),
    Case("infinity", body("return -math.inf"), "a score must be a finite"),
    Case("a list", body("return [1.0]"), "returned .1.0. .list., which is no number"),
    Case("a complex number", body("return 1j"), "which is no number"),
    Case("a boolean", body("return response == answer"), WORKS),
    Case("a dictionary", body("return {'score': 1.0, 'length': 3}"), WORKS),
    Case("a dictionary without a score", body("return {'reward': 1.0}"), "without the key 'score'"),
    Case("a dictionary with text", body("return {'score': 'good'}"), "which is no number"),
    Case("a generator", body("yield 1.0"), "generator.*which is no number"),
    Case(
        "a coroutine of a plain function",
        mine("async def f(): return 1.0\ndef score(response): return f()"),
        "declared `async def`",
    ),
    Case("asynchronous", mine("async def score(response, **row): return 1.0"), WORKS),
    Case(
        "an asynchronous generator",
        mine("async def score(response, **row):\n    yield 1.0"),
        "score",
    ),
    Case("too few of a batch", batch("return []"), "returned 0 scores for 1 completions"),
    Case("one number for a batch", batch("return 1.0"), "one of TRL's shape returns a list"),
    Case(
        "text for a batch",
        batch("return ['good'] * len(completions)"),
        "'good' .str. for completion 1",
    ),
    Case(
        "NaN for a batch",
        batch("return [float('nan')] * len(completions)"),
        "for completion 1, expected a",
    ),
    # What it does
    Case("it raises", body("raise ValueError('no')"), "ValueError: no"),
    Case("it exits", body("raise SystemExit(3)"), "SystemExit"),
    Case("it kills its process", body("import os; os._exit(7)"), "exit"),
    Case("it hangs", body("import time; time.sleep(100)", "reward.timeout_s=0.5"), "longer than"),
    Case(
        "it raises, and rows are dropped",
        body("raise ValueError('no')", "reward.on_error=drop"),
        WORKS,
    ),
    Case("it prints", body("print('x' * 100); return 1.0"), WORKS),
    # Beside functions
    Case("no such judge", spec(JUDGE), "reward.judge.path=/nowhere/judge"),
    Case("no such template", spec("reward.judge.template=/nowhere/t.txt"), "reward.judge.template"),
    Case("no such way with errors", spec("reward.on_error=ignore"), "reward.on_error.*drop"),
    Case("no time", spec("reward.timeout_s=0"), "reward.timeout_s"),
    Case("no processes", spec("reward.processes=0"), "reward.processes"),
    Case(
        "an error value that is NaN", spec("reward.error_value=nan"), "reward.error_value.*finite"
    ),
]
