"""Programs that do what is asked, each in a style of its own, with tests that they pass."""

HONEST = {
    "a function": ("def f(x):\n    return x * x", ["assert f(2) == 4", "assert f(-3) == 9"]),
    "a lambda": ("f = lambda x: x * x", ["assert f(2) == 4"]),
    "a callable object": (
        "class F:\n    def __call__(self, x): return x * x\nf = F()",
        ["assert f(2) == 4", "assert f(3) != 8"],
    ),
    "partial and cache": (
        "import functools\n@functools.lru_cache(None)\ndef p(a, b): return a ** b\n"
        "f = functools.partial(p, b=2)",
        ["assert f(2) == 4"],
    ),
    "a main of its own": (
        "def f(x): return x * x\nif __name__ == '__main__':\n    raise SystemExit(f(2))",
        ["assert f(2) == 4"],
    ),
    "much printing": (
        "print('x' * 5_000_000)\ndef f(x):\n    print(x)\n    return x",
        ["assert f(1) == 1"],
    ),
    "prints at the end of lines": (
        "def f(x): print(x, flush=True); return [x]",
        ["assert f(1) == [1]"],
    ),
    "a name of a built-in": ("def sum(a, b): return a + b", ["assert sum(10, 15) == 25"]),
    "built-ins as variables": (
        "def f(x):\n    list, max, len = [x], x, 1\n    return list\nsum = 3\n",
        ["assert f(3) == [3]", "assert len(f(3)) == 1"],
    ),
    "a generator": (
        "def f(n):\n    for i in range(n): yield i",
        ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6", "assert next(f(1)) == 0"],
    ),
    "map and filter": (
        "def f(x): return map(str, filter(None, x))",
        ["assert list(f([0, 1])) == ['1']", "assert sorted(f([2, 1])) == ['1', '2']"],
    ),
    "views of dictionaries": (
        "def f(d): return d.keys()",
        ["assert f({'a': 1}) == {'a'}", "assert list(f({'b': 1, 'a': 2})) == ['b', 'a']"],
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, [x])",
        ["assert f(1) == (1, [1])", "assert f(1).x == 1", "assert [f(2)] == [(2, [2])]"],
    ),
    "ordered and default dictionaries": (
        "from collections import OrderedDict, defaultdict\ndef f(x):\n    d = defaultdict(list)\n"
        "    d[x].append(OrderedDict(a=x))\n    return d",
        ["assert f(1) == {1: [{'a': 1}]}"],
    ),
    "counters": (
        "from collections import Counter\ndef f(x): return Counter(x)",
        [
            "assert f('aab') == {'a': 2, 'b': 1}",
            "from collections import Counter\nassert f('ab') == Counter('ba')",
        ],
    ),
    "deques": (
        "from collections import deque\ndef f(x): return deque(x)",
        [
            "from collections import deque\nassert f([1]) == deque([1])",
            "assert list(f([1])) == [1]",
        ],
    ),
    "fractions and decimals": (
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        "def f(x): return Fraction(1, x), Decimal(1) / x",
        [
            "from fractions import Fraction\nfrom decimal import Decimal\n"
            "assert f(2) == (Fraction(1, 2), Decimal('0.5'))",
            "assert f(2)[0] == 0.5",
        ],
    ),
    "dates": (
        "import datetime\ndef f(y): return datetime.date(y, 1, 1) + datetime.timedelta(days=31)",
        [
            "import datetime\nassert f(2024) == datetime.date(2024, 2, 1)",
            "assert f(2024).isoformat() == '2024-02-01'",
        ],
    ),
    "sets": (
        "def f(x): return frozenset(x) | {0}",
        ["assert f([1]) == {0, 1}", "assert set(f([1])) == set([1, 0])", "assert 1 in f([1])"],
    ),
    "bytes": ("def f(x): return x.encode('utf-8')", ["assert f('é') == b'\\xc3\\xa9'"]),
    "complex numbers": (
        "def f(x): return complex(x, 1)",
        ["assert f(2) == 2+1j", "assert abs(f(0)) == 1"],
    ),
    "infinity and no number": (
        "def f(x): return float(x)",
        [
            "assert f('inf') == float('inf')",
            "import math\nassert math.isnan(f('nan'))",
            "assert f('nan') != f('nan')",
        ],
    ),
    "large numbers": (
        "import math\ndef f(x): return math.factorial(x)",
        [
            "assert f(25) == 15511210043330985984000000",
            "assert f(1000) % 1000 == 0",
            "assert len(str(f(1000))) == 2568",
        ],
    ),
    "close numbers": (
        "def f(x): return x / 3",
        [
            "assert abs(f(1) - 0.333333) < 1e-5",
            "import math\nassert math.isclose(f(1), 1 / 3)",
            "assert round(f(2), 2) == 0.67",
            "from math import isclose\nassert isclose(f(3), 1.0)",
        ],
    ),
    "numpy": (
        "import numpy as np\ndef f(x): return np.array(x) * 2",
        [
            "import numpy as np\nassert np.allclose(f([1, 2]), [2.0, 4.0])",
            "assert f([1])[0] == 2",
            "assert f([1, 2]).tolist() == [2, 4]",
            "assert list(f([3])) == [6]",
            "import numpy as np\nassert (f([1]) == np.array([2])).all()",
        ],
    ),
    "numbers of numpy": (
        "import numpy as np\ndef f(x): return np.float64(x) if x > 1 else np.int64(x)",
        ["assert f(1) == 1", "assert f(2.5) == 2.5", "assert isinstance(f(2.5), float)"],
    ),
    "truths": (
        "def f(x): return x > 1",
        [
            "assert f(2)",
            "assert not f(1)",
            "assert f(2) is True",
            "assert f(0) == False",
            "assert f(2) and not f(0) or f(9)",
        ],
    ),
    "nothing": ("def f(x): return None", ["assert f(1) is None", "assert f(1) == None"]),
    "in place": (
        "def f(x): x.sort()",
        [
            "given = [3, 1]\nf(given)\nassert given == [1, 3]",
            "x = [2, 1]\nassert f(x) is None and x[0] == 1",
        ],
    ),
    "classes": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __contains__(self, x): return x in self.items",
        [
            "s = Stack()\ns.push(1)\nassert len(s) == 1\nassert 1 in s and 2 not in s\nassert s.pop() == 1\n"
            "assert not s.items"
        ],
    ),
    "data classes": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\n"
        "def f(x): return P(x)",
        [
            "assert f(1) == P(1)",
            "assert f(1) != P(2) and f(1) < P(2)",
            "assert f(3).x == 3",
            "assert str(f(1)) == 'P(x=1)'",
        ],
    ),
    "enumerations": (
        "import enum\nclass C(enum.Enum):\n    RED = 1\nclass N(enum.IntEnum):\n    ONE = 1\n"
        "def f(x): return C(x)",
        [
            "assert f(1) == C.RED",
            "assert f(1).value == 1",
            "assert N.ONE == 1",
            "assert f(1) is C.RED",
        ],
    ),
    "errors": (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
        [
            "try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert 'neg' in str(error)"
        ],
    ),
    "check(candidate)": (
        "from typing import List\n\ndef has(numbers: List[float], t: float) -> bool:\n"
        "    return any(abs(a - b) < t for i, a in enumerate(numbers) for b in numbers[:i])",
        [
            "\n\nMETADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
            "    assert candidate([1.0, 2.0], 0.3) == False\n"
            "    assert candidate([1.0, 1.1], 0.3) == True, 'close'\n\ncheck(has)"
        ],
    ),
    "loops of tests": (
        "def f(x): return x * x",
        [
            "for i in range(5):\n    assert f(i) == i * i",
            "assert all(f(i) == i ** 2 for i in range(4))",
            "cases = {1: 1, 2: 4}\nfor given, expected in cases.items():\n    assert f(given) == expected",
            "xs, ys = [1, 2], [1, 4]\nfor x, y in zip(xs, ys):\n    assert f(x) == y",
            "assert [f(x) for x in (1, 2)] == [1, 4] and list(map(f, [3])) == [9]",
        ],
    ),
    "functions of the tests": (
        "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "def rev(h):\n    p = None\n    while h: h.n, p, h = p, h, h.n\n    return p",
        [
            "def build(xs):\n    h = None\n    for x in reversed(xs): h = Node(x, h)\n    return h\n"
            "def plain(h):\n    out = []\n    while h:\n        out.append(h.v)\n        h = h.n\n    return out\n"
            "assert plain(rev(build([1, 2, 3]))) == [3, 2, 1]"
        ],
    ),
    "either of two": (
        "def f(x): return {x, x + 1}.pop()",
        [
            "assert f(1) == 1 or f(1) == 2",
            "assert f(1) in (1, 2)",
            "assert f(1) in {1, 2} and f(5) > 4",
        ],
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(30000)\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
        ["assert f(20000) == 20000"],
    ),
    "threads and asyncio": (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\nasync def g(x): return x\n"
        "def f(x):\n    with ThreadPoolExecutor(2) as pool: return list(pool.map(asyncio.run, [g(x)]))",
        ["assert f(3) == [3]"],
    ),
    "names beyond ASCII, and Windows lines": (
        "größe = 3\r\ndef f(ж):\r\n    return größe * ж\r\n",
        ["assert f(2) == 6", "assert f('é') == 'é' * 3"],
    ),
    "sorting by a key": (
        "def f(x): return [(w, len(w)) for w in x]",
        [
            "assert sorted(f(['bb', 'a']), key=lambda p: p[1]) == [('a', 1), ('bb', 2)]",
            "assert max(f(['bb', 'a']), key=lambda p: p[1])[0] == 'bb'",
        ],
    ),
    "texts": (
        "def f(x): return x.title()",
        [
            "assert f('a b') == 'A B'",
            "assert f('a').lower() == 'a'",
            "assert f('a b').split() == ['A', 'B']",
            "assert f'{f(\"a\")}!' == 'A!'",
            "assert f('ab').startswith('A')",
        ],
    ),
    "standard input by name": (
        "import sys\nn = int(open('/dev/stdin').readline())\nprint(n * n)",
        [{"input": "3\n", "output": "9"}],
    ),
    "standard input, many ways": (
        "import sys\ninput = sys.stdin.readline\nn = int(input())\nsys.stdout.write(str(n * n))",
        [{"input": "3\n", "output": "9"}, {"input": "4", "output": "16\n"}],
    ),
    "standard input by pathlib": (
        "from pathlib import Path\nprint(sum(map(int, Path('/dev/stdin').read_text().split())))",
        [{"input": "1 2\n3\n", "output": "6"}],
    ),
    "standard output by name": (
        "data = open(0).read()\nwith open('/dev/stdout', 'w') as out: print(data.upper(), file=out)",
        [{"input": "abc", "output": "ABC"}],
    ),
    "a file of its own": (
        "open('x', 'w').write('1')\ndef f(): return open('x').read()",
        ["assert f() == '1'"],
    ),
    "what objects make of themselves": (
        "class L:\n    def __init__(self, *items): self.items = items\n"
        "    def __iter__(self): return iter(self.items)\n    def __bool__(self): return 1 in self\n"
        "    def __contains__(self, x): return x in self.items\n    def __abs__(self): return 5\n"
        "    def __hash__(self): return 1\n    def __eq__(self, other): return True\n",
        [
            "assert L(1) and not L(2)",
            "assert bool(L()) is False",
            "items = L(1, 2)\nassert items and [x for x in items] == [1, 2]",
            "assert [x + 1 for x in L(1, 2)] == [2, 3]",
            "assert all(x > 0 for x in L(1, 2))",
            "assert abs(L()) == 5 and min(L(3, 2)) == 2",
            "assert len({L(1), L(2)}) == 1",
        ],
    ),
    "lists of objects": (
        "class N:\n    def __init__(self, value): self.value = value\n"
        "def f(n): return [N(i) for i in range(n)]",
        [
            "assert [n.value for n in f(2)] == [0, 1]",
            "assert sum(n.value for n in f(3)) == 3",
            "nodes = f(2)\nassert {n.value for n in nodes} == {0, 1}",
            "assert all(n.value < 2 for n in f(2))",
        ],
    ),
    "a match": (
        "import re\ndef f(x): return re.match('a+', x)",
        ["assert f('aa')", "assert not f('b')", "m = f('aa')\nassert m and m.group() == 'aa'"],
    ),
    "views of ordered dictionaries": (
        "from collections import OrderedDict\ndef f(): return OrderedDict(b=1, a=2)",
        [
            "assert list(f().items()) == [('b', 1), ('a', 2)]",
            "assert list(f().keys()) == ['b', 'a']",
            "assert f().keys() == {'a', 'b'}",
        ],
    ),
    "unpacked, cut and formatted": (
        "def f(x): return x",
        [
            "assert [*f([1]), 2] == [1, 2]",
            "assert (*f((1,)), 2) == (1, 2)",
            "assert f(1) << 3 == 8",
            "assert [x[1:] for x in f(['ab'])] == ['b']",
            "assert [f'{x}' for x in f([1])] == ['1']",
        ],
    ),
    "derived from data, judged inside": (
        "import enum\nfrom collections import OrderedDict, defaultdict, namedtuple\n"
        "import numpy as np\nP = namedtuple('P', 'x y')\nclass E(enum.IntEnum): A = 3\n"
        "def f(k):\n    values = [P(1, 2), E.A, defaultdict(int, a=1), OrderedDict(a=1)]\n"
        "    return [*values, np.float64(2.5), [np.int64(2)]][k]",
        [
            f"if True:\n    assert f({k}) == {expected}"
            for k, expected in enumerate(["(1, 2)", "3", "{'a': 1}", "{'a': 1}", "2.5", "[2]"])
        ],
    ),
}
