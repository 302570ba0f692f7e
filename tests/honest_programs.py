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
    "lru": (
        (
            "from collections import OrderedDict\n"
            "class LRUCache(OrderedDict):\n"
            "  def __init__(self, n): self.n=n\n"
            "  def get(self,k):\n"
            "    if k not in self: return -1\n"
            "    self.move_to_end(k); return self[k]\n"
            "  def put(self,k,v):\n"
            "    self[k]=v; self.move_to_end(k)\n"
            "    if len(self)>self.n: self.popitem(last=False)\n"
            ""
        ),
        [
            (
                "c=LRUCache(2)\n"
                "c.put(1,1)\n"
                "c.put(2,2)\n"
                "assert c.get(1)==1\n"
                "c.put(3,3)\n"
                "assert c.get(2)==-1\n"
                "assert len(c)==2 and 1 in c and 2 not in c\n"
                "assert c == {1:1,3:3}"
            )
        ],
    ),
    "vector": (
        (
            "class Vector:\n"
            "  def __init__(s,x,y): s.x,s.y=x,y\n"
            "  def __add__(s,o): return Vector(s.x+o.x,s.y+o.y)\n"
            "  def __mul__(s,k): return Vector(s.x*k,s.y*k)\n"
            "  __rmul__=__mul__\n"
            "  def __eq__(s,o): return isinstance(o,Vector) and (s.x,s.y)==(o.x,o.y)\n"
            "  def __repr__(s): return f'Vector({s.x}, {s.y})'\n"
            "  def __abs__(s): return (s.x**2+s.y**2)**.5\n"
            "  def __iter__(s): yield s.x; yield s.y\n"
            "  def __neg__(s): return Vector(-s.x,-s.y)"
        ),
        [
            (
                "a,b=Vector(1,2),Vector(3,4)\n"
                "assert a+b==Vector(4,6)\n"
                "assert a*3==Vector(3,6) and 2*a==Vector(2,4)\n"
                "assert abs(b)==5\n"
                "assert repr(a)=='Vector(1, 2)' and str(a)=='Vector(1, 2)' and f'{a}'=='Vector(1, 2)'\n"
                "x,y=a\n"
                "assert (x,y)==(1,2)\n"
                "assert a!=b and -a==Vector(-1,-2)\n"
                "a.x=5\n"
                "assert a.x==5"
            )
        ],
    ),
    "nodes": (
        (
            "class Node:\n"
            "  def __init__(s,v,l=None,r=None): s.val,s.left,s.right=v,l,r\n"
            "class Solution:\n"
            "  def lca(self,root,p,q):\n"
            "    if root in (None,p,q): return root\n"
            "    a,b=self.lca(root.left,p,q),self.lca(root.right,p,q)\n"
            "    return root if a and b else a or b"
        ),
        [
            (
                "a,b=Node(1),Node(2)\n"
                "root=Node(0,a,b)\n"
                "assert Solution().lca(root,a,b) is root\n"
                "assert Solution().lca(a,a,b) is a\n"
                "assert root.left is a and root.right is not a\n"
                "assert Solution().lca(root,a,b).val==0"
            )
        ],
    ),
    "node of the test": (
        (
            "def total(n):\n"
            "  s=0\n"
            "  while n: s+=n.val; n=n.next\n"
            "  return s\n"
            "def rev(h):\n"
            "  p=None\n"
            "  while h: h.next,p,h=p,h,h.next\n"
            "  return p"
        ),
        [
            (
                "class N:\n"
                "  def __init__(self,val,next=None): self.val,self.next=val,next\n"
                "assert total(N(1,N(2,N(3))))==6\n"
                "h=rev(N(1,N(2)))\n"
                "assert h.val==2 and h.next.val==1 and h.next.next is None"
            )
        ],
    ),
    "context": (
        (
            "class Timer:\n"
            "  def __enter__(s): s.on=True; return s\n"
            "  def __exit__(s,*a): s.on=False; return False\n"
            "import contextlib\n"
            "@contextlib.contextmanager\n"
            "def cm(x):\n"
            "  yield x+1\n"
            "class Sup:\n"
            "  def __enter__(s): return s\n"
            "  def __exit__(s,k,e,t): return k is ValueError"
        ),
        [
            ("with Timer() as t:\n  assert t.on\nassert not t.on"),
            ("with cm(3) as y:\n  assert y==4"),
            ("with Sup():\n  raise ValueError\nassert True"),
        ],
    ),
    "iterators": (
        (
            "class Count:\n"
            "  def __init__(s,n): s.n=n; s.i=0\n"
            "  def __iter__(s): return s\n"
            "  def __next__(s):\n"
            "    if s.i>=s.n: raise StopIteration\n"
            "    s.i+=1; return s.i\n"
            "def primes():\n"
            "  n=2\n"
            "  while True:\n"
            "    if all(n%k for k in range(2,n)): yield n\n"
            "    n+=1"
        ),
        [
            ("assert list(Count(3))==[1,2,3]"),
            ("import itertools\nassert list(itertools.islice(primes(),5))==[2,3,5,7,11]"),
            ("assert [p for p,_ in zip(primes(),range(3))]==[2,3,5]"),
            ("it=iter(Count(1))\nassert next(it)==1\nassert next(it,None) is None"),
            ("assert all(a==b for a,b in zip([2,3,5],primes()))"),
        ],
    ),
    "callbacks": (
        (
            "def apply(f,xs): return [f(x) for x in xs]\n"
            "def compose(*fs):\n"
            "  def g(x):\n"
            "    for f in reversed(fs): x=f(x)\n"
            "    return x\n"
            "  return g\n"
            "def memo(f):\n"
            "  c={}\n"
            "  def g(*a):\n"
            "    if a not in c: c[a]=f(*a)\n"
            "    return c[a]\n"
            "  return g\n"
            "class Bus:\n"
            "  def __init__(s): s.h={}\n"
            "  def on(s,e,f): s.h.setdefault(e,[]).append(f)\n"
            "  def emit(s,e,*a):\n"
            "    for f in s.h.get(e,[]): f(*a)\n"
            "def retry(f,n):\n"
            "  for i in range(n):\n"
            "    try: return f()\n"
            "    except ValueError: pass\n"
            "  raise RuntimeError('x')"
        ),
        [
            ("assert apply(lambda x:x*2,[1,2])==[2,4]"),
            ("assert compose(lambda x:x+1,lambda x:x*2)(3)==7"),
            ("assert apply(str,[1])==['1'] and apply(len,['ab'])==[2] and apply(abs,[-1])==[1]"),
            (
                "calls=[]\n"
                "def slow(x):\n"
                "  calls.append(x); return x\n"
                "g=memo(slow)\n"
                "assert g(1)==1 and g(1)==1 and calls==[1]"
            ),
            (
                "b=Bus()\n"
                "seen=[]\n"
                "b.on('x',seen.append)\n"
                "b.on('x',lambda v:seen.append(v*2))\n"
                "b.emit('x',2)\n"
                "assert seen==[2,4]"
            ),
            (
                "n=[0]\n"
                "def flaky():\n"
                "  n[0]+=1\n"
                "  if n[0]<3: raise ValueError\n"
                "  return 'ok'\n"
                "assert retry(flaky,5)=='ok' and n==[3]"
            ),
            (
                "class Mine(Exception): pass\n"
                "def bad(): raise Mine('a')\n"
                "try:\n"
                "  retry(bad,2)\n"
                "  assert False\n"
                "except Mine as e:\n"
                "  assert str(e)=='a'"
            ),
            ("@memo\ndef fib(n): return n if n<2 else fib(n-1)+fib(n-2)\nassert fib(20)==6765"),
        ],
    ),
    "errors, tested more": (
        (
            "import json\n"
            "class AppError(Exception):\n"
            "  def __init__(s,m,code): super().__init__(m); s.code=code\n"
            "class SubError(AppError): pass\n"
            "def f(k):\n"
            "  if k==1: raise AppError('bad',3)\n"
            "  if k==2: raise SubError('sub',4)\n"
            "  if k==3: return json.loads('{')\n"
            "  if k==4: return {}['x']\n"
            "  if k==5: return 1/0\n"
            "  raise OSError(2,'no such')"
        ),
        [
            (
                "import pytest\n"
                "def test():\n"
                "  with pytest.raises(AppError, match='bad') as e: f(1)\n"
                "  assert e.value.code==3\n"
                "  with pytest.raises(AppError): f(2)"
            ),
            (
                "import json\n"
                "try:\n"
                "  f(3)\n"
                "  assert False\n"
                "except json.JSONDecodeError as e:\n"
                "  assert 'Expecting' in str(e)"
            ),
            ("try:\n  f(4)\n  assert 0\nexcept KeyError as e:\n  assert e.args[0]=='x'"),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertRaises(ZeroDivisionError,f,5)\n"
                "    with self.assertRaisesRegex(OSError,'no such') as c: f(6)\n"
                "    self.assertEqual(c.exception.errno,2)\n"
                "    with self.assertRaises(SubError): f(2)"
            ),
        ],
    ),
    "class members": (
        (
            "import enum, abc\n"
            "class Color(enum.Enum):\n"
            "  RED=1\n"
            "  BLUE=2\n"
            "class Shape(abc.ABC):\n"
            "  @abc.abstractmethod\n"
            "  def area(self): ...\n"
            "class Sq(Shape):\n"
            "  count=0\n"
            "  def __init__(s,a): s.a=a; Sq.count+=1\n"
            "  def area(s): return s.a**2\n"
            "  @classmethod\n"
            "  def unit(c): return c(1)\n"
            "  @staticmethod\n"
            "  def name(): return 'sq'\n"
            "  @property\n"
            "  def side(s): return s.a\n"
            "  def __lt__(s,o): return s.a<o.a\n"
            "  def __hash__(s): return 5"
        ),
        [
            (
                "assert Color.RED.value==1 and Color.RED.name=='RED' and Color(2) is Color.BLUE and Color['RED'] is Color.RED\n"
                "assert [c.name for c in Color]==['RED','BLUE'] and len(Color)==2\n"
                "assert {Color.RED:1}[Color.RED]==1"
            ),
            (
                "s=Sq(3)\n"
                "assert s.area()==9 and s.side==3 and Sq.unit().a==1 and Sq.name()=='sq'\n"
                "assert isinstance(s,Sq) and isinstance(s,Shape) and issubclass(Sq,Shape) and not isinstance(3,Sq)\n"
                "assert type(s) is Sq and type(s).__name__=='Sq'\n"
                "assert sorted([Sq(3),Sq(1)])[0].a==1\n"
                "assert hasattr(s,'area') and not hasattr(s,'zzz')\n"
                "assert s.__class__.__name__=='Sq'"
            ),
            ("try:\n  Shape()\n  assert False\nexcept TypeError:\n  pass"),
            ("before=Sq.count\nSq(1)\nassert Sq.count==before+1"),
        ],
    ),
    "data classes and tuples": (
        (
            "from dataclasses import dataclass, field\n"
            "from typing import NamedTuple\n"
            "@dataclass(frozen=True)\n"
            "class P:\n"
            "  x:int\n"
            "  y:int=0\n"
            "class Q(NamedTuple):\n"
            "  a:int\n"
            "  b:str='z'\n"
            "def f(n): return [Q(i) for i in range(n)]"
        ),
        [
            ("assert P(1)==P(1,0) and len({P(1),P(1)})==1"),
            (
                "import dataclasses\n"
                "try:\n"
                "  P(1).x=3\n"
                "  assert False\n"
                "except AttributeError:\n"
                "  pass"
            ),
            (
                "assert f(2)==[(0,'z'),(1,'z')] and f(2)[1].a==1 and Q(1)._asdict()=={'a':1,'b':'z'} and Q(1)._replace(a=2)==(2,'z')\n"
                "a,b=Q(3)\n"
                "assert a==3"
            ),
        ],
    ),
    "state": (
        (
            "count=0\n"
            "log=[]\n"
            "def inc():\n"
            "  global count\n"
            "  count+=1\n"
            "  log.append(count)\n"
            "  return count"
        ),
        [("inc()\nassert count==1\ninc()\nassert count==2 and log==[1,2]")],
    ),
    "numpy, tested more": (
        (
            "import numpy as np\n"
            "def norm(a): a-=a.mean(); return a\n"
            "def g(a): return a[a>0]\n"
            "def h(): return np.float32(1.5), np.array(['a','b']), np.array([1,2],dtype='int32')"
        ),
        [
            (
                "import numpy as np\n"
                "a=np.array([1.0,3.0])\n"
                "r=norm(a)\n"
                "assert np.allclose(a,[-1,1]) and np.allclose(r,a)\n"
                "assert isinstance(r,np.ndarray) and r.shape==(2,) and r.dtype==float"
            ),
            (
                "import numpy as np\n"
                "assert g(np.array([-1])).size==0 and np.array_equal(g(np.array([-1])),np.array([]))\n"
                "assert len(g(np.array([-1])))==0\n"
                "assert g(np.array([-1])).sum()==0"
            ),
            (
                "import numpy as np\n"
                "x,y,z=h()\n"
                "assert x==1.5 and list(y)==['a','b'] and z.dtype==np.int32\n"
                "np.testing.assert_allclose(z,[1,2])\n"
                "assert (z==np.array([1,2])).all()"
            ),
        ],
    ),
    "async": (
        (
            "import asyncio\n"
            "async def f(x):\n"
            "  await asyncio.sleep(0)\n"
            "  return x+1\n"
            "async def many(): return await asyncio.gather(f(1),f(2))"
        ),
        [
            ("import asyncio\nassert asyncio.run(f(1))==2"),
            (
                "import asyncio\n"
                "async def t():\n"
                "  assert await f(2)==3\n"
                "  return await many()\n"
                "assert asyncio.run(t())==[2,3]"
            ),
            (
                "import unittest\n"
                "class T(unittest.IsolatedAsyncioTestCase):\n"
                "  async def test(self): self.assertEqual(await f(1),2)"
            ),
        ],
    ),
    "prints": (
        ("def f(x): print('a',x); print('b')"),
        [
            (
                "import io,contextlib\n"
                "b=io.StringIO()\n"
                "with contextlib.redirect_stdout(b): f(3)\n"
                "assert b.getvalue()=='a 3\\nb\\n'"
            ),
            (
                "def test(capsys):\n"
                "  f(1)\n"
                "  assert capsys.readouterr().out=='a 1\\nb\\n'\n"
                "  import pytest"
            ),
        ],
    ),
    "decorators, partial and names": (
        (
            "import functools\n"
            "def deco(f):\n"
            "  @functools.wraps(f)\n"
            "  def g(*a,**k): return f(*a,**k)*2\n"
            "  return g\n"
            "def kw(*a,b=1,**k): return (a,b,k)"
        ),
        [
            ("@deco\ndef h(x):\n  return x\nassert h(2)==4 and h.__name__=='h'"),
            ("assert kw(1,2,b=3,c=4)==((1,2),3,{'c':4}) and kw()==((),1,{})"),
        ],
    ),
    "mutations": (
        (
            "def f(g):\n"
            "  for r in g: r.reverse()\n"
            "  g.append([9])\n"
            "  return g[0]\n"
            "def d(x): x['n']['m'].add(1); del x['k']\n"
            "def fill(q): q.append(1); q.rotate(1)\n"
            "def pop(x): return x.pop()\n"
            "def bad(x):\n"
            "  x.append(1); raise ValueError"
        ),
        [
            ("g=[[1,2],[3,4]]\nr=f(g)\nassert g==[[2,1],[4,3],[9]] and r is g[0]"),
            ("x={'n':{'m':set()},'k':1}\nd(x)\nassert x=={'n':{'m':{1}}}"),
            ("from collections import deque\nq=deque([0,2])\nfill(q)\nassert q==deque([1,0,2])"),
            ("i=[5]\nx=[i]\nassert pop(x) is i and x==[]"),
            ("x=[]\ntry:\n  bad(x)\n  assert False\nexcept ValueError:\n  assert x==[1]"),
        ],
    ),
    "linked data": (
        (
            "class Tree:\n"
            "  def __init__(s): s.items=[]; s.meta={}\n"
            "  def size(s): return len(s.items)"
        ),
        [
            ("t=Tree()\nt.items.append(1)\nassert t.size()==1"),
            ("t=Tree()\nt.meta['a']=1\nassert t.meta=={'a':1}"),
        ],
    ),
    "floats": (
        ("def f(x): return x/3"),
        [
            ("assert f(1)==1/3"),
            ("import pytest\ndef test(): assert f(1)==pytest.approx(0.33333,abs=1e-4)"),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self): self.assertAlmostEqual(f(1),.333333,places=5)"
            ),
        ],
    ),
    "fixtures": (
        (
            "class Acc:\n"
            "  def __init__(s,b=0): s.b=b\n"
            "  def dep(s,n):\n"
            "    if n<=0: raise ValueError('n')\n"
            "    s.b+=n"
        ),
        [
            (
                "import pytest\n"
                "from solution import Acc\n"
                "@pytest.fixture\n"
                "def acc(): return Acc(10)\n"
                "class TestAcc:\n"
                "  def setup_method(self): self.other=Acc()\n"
                "  def test_dep(self,acc):\n"
                "    acc.dep(5)\n"
                "    assert acc.b==15 and self.other.b==0\n"
                "  @pytest.mark.parametrize('n',[0,-1])\n"
                "  def test_bad(self,acc,n):\n"
                "    with pytest.raises(ValueError): acc.dep(n)"
            ),
            (
                "import unittest\n"
                "class Base(unittest.TestCase):\n"
                "  def setUp(self): self.a=Acc(1)\n"
                "  def tearDown(self): pass\n"
                "  def test_a(self):\n"
                "    self.a.dep(1); self.assertEqual(self.a.b,2)\n"
                "  def test_sub(self):\n"
                "    for n in (1,2):\n"
                "      with self.subTest(n=n): self.assertEqual(Acc(n).b,n)\n"
                "class Other(Base): pass\n"
                "unittest.main()"
            ),
        ],
    ),
    "sqlite and files": (
        ("import os\ndef w(p,t): open(p,'w').write(t)\ndef r(p): return open(p).read()"),
        [
            (
                "import tempfile,os\n"
                "d=tempfile.mkdtemp()\n"
                "p=os.path.join(d,'x')\n"
                "open(p,'w').write('hi')\n"
                "assert r(p)=='hi'\n"
                "w('out.txt','yo')\n"
                "assert open('out.txt').read()=='yo'"
            )
        ],
    ),
    "empty arrays": (
        ("def f(x): return [i for i in x if i > 0]"),
        [
            (
                "import numpy as np\n"
                "r = np.array(f([-1]))\n"
                "assert (r == np.array([])).all() and r.size == 0\n"
                "assert np.append(r, 3).tolist() == [3] and np.concatenate([r, r]).shape == (0,)\n"
                "assert np.abs(np.array(f([2])) - 2).max() == 0"
            )
        ],
    ),
    "objects of functions": (
        (
            "class Stack:\n"
            "  def __init__(s): s.i=[]\n"
            "  @classmethod\n"
            "  def of(c,*i):\n"
            "    s=c(); s.i+=i; return s\n"
            "  def pop(s): return s.i.pop()\n"
            "  def get(s,k,d=None): return s.i[k] if k<len(s.i) else d\n"
            "def make(): return Stack.of(1)\n"
            "class V:\n"
            "  def __init__(s,x): s.x=x\n"
            "  def __add__(s,o): return V(s.x+o.x)\n"
            "  def __mul__(s,k): return V(s.x*k)\n"
            "  __rmul__=__mul__\n"
            "  def __eq__(s,o): return s.x==o.x\n"
            "  def __contains__(s,x): return s.x==x"
        ),
        [
            ("assert Stack.of(1,2).pop()==2 and make().get(0)==1 and make().get(9,5)==5"),
            ("assert (V(1)+V(2))*2==V(6) and (3*(V(1)*2)).x==6 and 3 in V(1)+V(2)"),
            ("from solution import V as W\nassert 3 in W(3) and (W(1)+W(1))*2==W(4)"),
        ],
    ),
}
