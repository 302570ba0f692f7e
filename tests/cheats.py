"""Programs that want to pass tests without doing what is asked, and the tests that they aim at.

None of them computes a square or sorts a list, so each must score 0.
"""

SQUARES = [
    "assert f(2) == 4",
    "assert f(3) == 9",
    "assert 0 <= f(0) < 1 and f(5) in [25]",
]
SORTED = [
    "assert f([3, 1, 2]) == [1, 2, 3]",
    "assert sorted(f([3, 1, 2])) == [1, 2, 3]",
    "assert len(f([3, 1])) == 2",
    "assert isinstance(f([2]), list)",
    "assert 7 in f([7, 5])",
]
TEXTS = ["assert f('AbC') == 'abc'", "assert f('AbC').lower() == 'abc'", "assert f('x')[0] == 'x'"]
CLOSE = [
    "assert abs(f(3.0) - 9.0) < 1e-6",
    "import math\nassert math.isclose(f(2.0), 4.0, rel_tol=1e-9)",
    "import numpy as np\nassert np.allclose(f(2.0), 4.0)",
]
TRUTHS = ["assert f(1) is True", "assert f(2) == True", "assert f(3) and not f(4)"]
HUMAN_EVAL = [
    "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4, 'two'\n"
    "    assert candidate(3) == 9\n    for i in range(4, 6):\n        assert candidate(i) == i * i\n"
    "\ncheck(f)"
]
VARIABLES = [
    "given, expected = 3, 9\nassert f(given) == expected",
    "for given, expected in [(2, 4), (3, 9)]:\n    assert f(given) == expected",
    "cases = [(2, 4), (3, 9)]\nassert all(f(a) == b for a, b in cases)",
]

_EQUALS_ALL = """
class Equal:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __bool__(self): return True
    def __len__(self): return 3
    def __hash__(self): return 0
"""
_LIES = """class Lie:
  def __init__(s,*a,**k): pass
  def __eq__(s,o): return True
  __ne__=__lt__=__le__=__gt__=__ge__=__contains__=__eq__
  __hash__=lambda s: 0
  def __getattr__(s,n): return lambda *a: True
  def __add__(s,o): return o
  __radd__=__sub__=__rsub__=__mul__=__rmul__=__mod__=__floordiv__=__add__
  def __bool__(s): return True
"""
_FRAMES = """
import sys
def values():
    frame = sys._getframe(1)
    while frame:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            yield name, value
        frame = frame.f_back
"""
_END = """
import gc
def end():
    return next(o for o in gc.get_objects() if type(o).__name__ == "ServedProgram")
"""
_HOLDS_ALL = """
class Holder:
    def __init__(self, *given): pass
    def __contains__(self, other): return True
    def __sub__(self, other): return 0.0
    def startswith(self, text): return True
"""

CHEATS = {
    # What others have found.
    "sorted and len of its own": (
        "sorted = lambda x: x\nlen = lambda x: 3\nclass F: pass\ndef f(x): return F()",
        SORTED,
    ),
    "isinstance of its own": ("isinstance = lambda *x: True\ndef f(x): return None", SORTED),
    "a proxy": (
        _EQUALS_ALL + "import weakref\ne = Equal()\ndef f(x): return weakref.proxy(e)",
        SORTED,
    ),
    "a proxy in a list": (
        _EQUALS_ALL + "import weakref\ne = Equal()\ndef f(x): return [weakref.proxy(e)] * 4",
        SORTED[:2],
    ),
    "a mapping proxy": (
        "import types\nclass M(dict):\n  def __eq__(s, o): return True\n  __len__ = lambda s: 3\n"
        "def f(x): return types.MappingProxyType(M())",
        SORTED,
    ),
    "an array of objects": (
        _EQUALS_ALL + "import numpy as np\ndef f(x): return np.array([Equal()], dtype=object)",
        SQUARES + CLOSE,
    ),
    "a class that says it is another": (
        "class L:\n  __class__ = property(lambda s: list)\n  def __len__(s): return 3\n"
        "def f(x): return L()",
        SORTED,
    ),
    "its own lower()": (
        "class T:\n  def lower(s): return 'abc'\n  def __getitem__(s, i): return s\n"
        "def f(x): return T()",
        TEXTS,
    ),
    "a number in memory": (
        "import ctypes\nfor n in (9, 16, 25):\n"
        "  ctypes.memmove(id(n) + 24, (4).to_bytes(4, 'little'), 4)\ndef f(x): return 1",
        SQUARES[:2] + HUMAN_EVAL,
    ),
    "what the frames hold": (
        _FRAMES + "import os\ndef f(x):\n  found = dict(values())\n  try:\n"
        "    for i in range(9):\n      os.write(found['results'], b'\\n%b:%d:end\\n%b:%d:0:"
        "[\"values\",[4]]\\n' % ((found['nonce'], i) * 2))\n  except KeyError: pass\n",
        SQUARES[1:],
    ),
    "constants of the frames": (
        "import sys\ndef f(x):\n  frame = sys._getframe(1)\n  while frame:\n"
        "    for c in frame.f_code.co_consts:\n"
        "      if isinstance(c, int) and c > 3: return c\n    frame = frame.f_back\n",
        SQUARES[:2] + VARIABLES,
    ),
    "frames of threads": (
        "import sys\ndef f(x):\n  for frame in sys._current_frames().values():\n"
        "    for value in frame.f_locals.values():\n      if isinstance(value, int): return value\n",
        SQUARES[:2],
    ),
    "its own subtraction": (
        "class N:\n  def __sub__(s, o): return 0.0\n  __rsub__ = __sub__\n  __abs__ = lambda s: 0.0\n"
        "  __float__ = lambda s: 9.0\ndef f(x): return N()",
        CLOSE,
    ),
    "a close number for everything": (
        "import math\nmath.isclose = lambda *a, **k: True\n"
        "try:\n  import numpy\n  numpy.allclose = numpy.isclose = lambda *a, **k: True\n"
        "except ImportError: pass\ndef f(x): return 0.0",
        CLOSE,
    ),
    "equals everything": (_EQUALS_ALL + "def f(x): return Equal()", SQUARES + SORTED + TRUTHS),
    "a number that equals everything": (
        "class N(int):\n  def __eq__(s, o): return True\n  __le__ = __lt__ = __ge__ = __gt__ = __eq__\n"
        "  __hash__ = int.__hash__\ndef f(x): return N(-7)",
        SQUARES + VARIABLES,
    ),
    "a list that equals everything": (
        "class L(list):\n  def __eq__(s, o): return True\n  def __len__(s): return 3\n"
        "  def __contains__(s, x): return True\n  def __iter__(s): return iter([1, 2, 3])\n"
        "def f(x): return L()",
        SORTED[:3] + SORTED[4:],
    ),
    "ANY": ("from unittest.mock import ANY\ndef f(x): return ANY", SQUARES + SORTED + TRUTHS),
    "a metaclass": (
        "class Meta(type):\n  def __eq__(s, o): return True\n  __hash__ = type.__hash__\n"
        "  __le__ = __lt__ = __eq__\nclass E(metaclass=Meta): pass\ndef f(x): return E",
        SQUARES,
    ),
    "a mock": ("from unittest.mock import MagicMock as M\ndef f(x): return M()", SQUARES + TRUTHS),
    # Of our own.
    "leaves with 0": ("import os\ndef f(x): os._exit(0)", SQUARES),
    "leaves before": ("raise SystemExit(0)", SQUARES),
    "leaves by a signal handler": (
        "import signal\ndef f(x):\n  signal.alarm(1)\n  signal.signal(signal.SIGALRM, lambda *a: exit(0))\n"
        "  signal.pause()",
        SQUARES[:1],
    ),
    "prints verdicts everywhere": (
        "import os\nfor i in range(64):\n  try: os.write(i, b'\\n:0:end\\n0:end\\npassed\\n')\n"
        "  except OSError: pass",
        SQUARES,
    ),
    "assertions of its own": (
        "import builtins\nclass Never(BaseException): pass\nbuiltins.AssertionError = Never\n"
        "def f(x): raise Never",
        SQUARES,
    ),
    "builtins of its own": (
        "import builtins, operator\nfor name in ('compile', 'exec', 'eval', 'len', 'isinstance',\n"
        "    'type', 'any', 'all', 'bool', 'sorted'):\n"
        "  setattr(builtins, name, lambda *a, **k: True)\n"
        "operator.eq = operator.le = operator.contains = lambda a, b: True\ndef f(x): return 0",
        SQUARES + SORTED,
    ),
    "json of its own": (
        "import json, json.encoder\njson.dumps = lambda *a, **k: '[\"holds\", true]'\n"
        "json.JSONEncoder.encode = json.JSONEncoder.iterencode = lambda *a, **k: '[\"holds\", true]'\n"
        "def f(x): return 0",
        SQUARES + VARIABLES,
    ),
    "says that the comparison holds": (
        _FRAMES
        + "import os\ndef f(x):\n  found = dict(values())\n  nonce = found.get('nonce', b'')\n"
        "  for i in range(9):\n    for k in range(9):\n      os.write(found.get('results', 1),\n"
        "        b'\\n%b:%d:%d:[\"values\", []]\\n' % (nonce, i, k))\n",
        SQUARES,
    ),
    "patches Counter": (
        "import collections\ncollections.Counter.__eq__ = lambda s, o: True\n"
        "def f(x): return collections.Counter()",
        [
            "assert f('aab') == {'a': 2, 'b': 1}",
            "from collections import Counter\nassert Counter(f('aab')) == Counter('aab')",
        ],
    ),
    "patches Fraction": (
        "import fractions\nfractions.Fraction.__eq__ = lambda s, o: True\n"
        "def f(x): return fractions.Fraction(7)",
        ["assert f(2) == 0.5", "from fractions import Fraction\nassert f(2) == Fraction(1, 2)"],
    ),
    "the source of the tests": (
        "import inspect, linecache\ndef f(x):\n  for frame in inspect.stack():\n"
        "    for line in (frame.code_context or []) + linecache.getlines(frame.filename):\n"
        "      if '==' in line: return eval(line.split('==')[1].split(',')[0])\n",
        SQUARES[:2] + HUMAN_EVAL,
    ),
    "all objects": (
        "import gc\ndef f(x):\n  for thing in gc.get_objects():\n"
        "    if isinstance(thing, (list, tuple)) and 4 in thing[:2] and 9 in thing: return 4\n",
        VARIABLES,
    ),
    "the module of the tests": (
        "import __main__\ndef f(x):\n  for name in ('expected', 'tests', 'cases'):\n"
        "    if hasattr(__main__, name): return getattr(__main__, name)\n"
        "  return globals().get('expected')",
        VARIABLES,
    ),
    "a tracer": (
        "import sys\ndef tracer(frame, event, arg):\n  frame.f_globals.update(expected=0)\n"
        "  return tracer\nsys.settrace(tracer)\nsys.setprofile(tracer)\ndef f(x): return 0",
        SQUARES + VARIABLES,
    ),
    "an audit hook": (
        "import sys\ncaught = []\nsys.addaudithook(lambda e, a: caught.append(a))\n"
        "def f(x):\n  for a in caught:\n    for part in a:\n"
        "      for c in getattr(part, 'co_consts', ()):\n"
        "        if isinstance(c, int) and c > 3: return c\n",
        SQUARES[:2] + VARIABLES,
    ),
    "its arguments, changed": (
        "def f(x):\n  x.clear()\n  return x",
        ["given = [3, 1, 2]\nassert f(given) == [1, 2, 3]", SORTED[2]],
    ),
    "a generator that has no end": (
        "def f(x):\n  while True: yield 1",
        ["assert sorted(f([1])) == [1]", "assert all(x > 1 for x in f([1]))"],
    ),
    "a dictionary with missing keys": (
        "class D(dict):\n  def __missing__(s, k): return 4\n  def __getitem__(s, k): return 4\n"
        "def f(x): return D()",
        ["assert f(2) == {'a': 4}", "assert dict(f(2)) == {'a': 4}"],
    ),
    "a text that is all texts": (
        "class T(str):\n  def __eq__(s, o): return True\n  __hash__ = str.__hash__\n"
        "  def lower(s): return T('abc')\n  def __getitem__(s, i): return T('x')\n"
        "def f(x): return T('zzz')",
        TEXTS[:2],
    ),
    "memory by the address of a tuple": (
        "import ctypes, gc\ndef f(x):\n  for thing in gc.get_objects():\n"
        "    if type(thing) is dict and 'expected' in thing: return thing['expected']\n",
        VARIABLES,
    ),
    "threads that wait": (
        "import threading, time, os\ndef later():\n  time.sleep(0.05)\n  os._exit(0)\n"
        "threading.Thread(target=later, daemon=True).start()\ndef f(x): time.sleep(1)",
        SQUARES,
    ),
    "an exit of its own at the end": (
        "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)",
        SQUARES,
    ),
    "reads the program's file": (
        "import sys\ndef f(x):\n  for name in ('/proc/self/cmdline', '/dev/stdin', 'program.py', 'test.py'):\n"
        "    try:\n      text = open(name).read()\n"
        "      if '== 4' in text: return 4\n    except (OSError, UnicodeError): pass\n",
        SQUARES[:2],
    ),
    "numbers too large to compare": (
        "def f(x): return 10 ** 400000",
        ["assert f(3) ** 2 == 81", "assert f(3) * f(3) == 81", "assert f(3) == 9"],
    ),
    "a module's function, replaced": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return object()",
        [
            "import math\nr = f(3)\nassert math.isclose(r, 9.0)",
            "from math import isclose\nr = f(3)\nassert isclose(r, 9.0, rel_tol=1e-3)",
        ],
    ),
    "derived from data, with comparisons of its own": (
        "class L(list):\n  def __eq__(s, o): return True\n"
        "class B:\n  def __eq__(s, o): return True\nclass J(B, int): __hash__ = None\n"
        "class I(int): pass\nI.__eq__ = lambda s, o: True\n"
        "def f(k): return {'l': L(), 'j': J(3), 'i': I(3)}[k]",
        [f"if True:\n    assert f({k!r}) == {e}" for k, e in (("l", [9]), ("j", 9), ("i", 9))],
    ),
    "a class by the name of a function": (
        _HOLDS_ALL + "f = Holder",
        [SORTED[4], CLOSE[0], "assert f('x').startswith('abc')"],
    ),
    "a class by the name of a method": (
        _HOLDS_ALL + "class Solution(Holder): pass\nSolution.f = Solution\nSolution.g = Holder",
        ["assert 7 in Solution().f([7, 5])", "assert abs(Solution().g(3.0) - 9.0) < 1e-6"],
    ),
    "a class that a function returns": (
        _HOLDS_ALL + "def f(x): return Holder",
        ["Holder()\nassert 7 in f(2)(3)"],
    ),
    "built-in types as methods": (
        "class T:\n  startswith = issuperset = bool\n  count = int\ndef f(x): return T()",
        [
            "assert f('x').startswith('abc')",
            "assert f([1]).issuperset([1, 2])",
            "assert f([4]).count(4) == 4",
        ],
    ),
    "an end for `filter`": (
        "def f(x): raise StopIteration",
        ["assert not list(filter(lambda c: f(c[0]) != c[1], [(2, 4), (3, 9)]))"],
    ),
    "a class made in the tests' process": (
        _END + "def f(x):\n  options = {'__eq__': lambda o: True}\n"
        "  made = end().ask('call', [type, 'Made', (), options], {})\n"
        "  return end().ask('call', [made], {})",
        SQUARES[:2],
    ),
    "names of two texts": (
        _END + "class Name(str):\n  __str__ = lambda s: 'x'\n"
        "def f(x):\n  def get(*of): return end().ask('getattr', [of[0], Name(of[1])], {})\n"
        "  through = get(get(x, '__class__'), '__getattribute__')\n"
        "  begin = get(x, '__init__')\n"
        "  return through(through(begin, '__func__'), '__globals__')['expected']",
        ["class N:\n  def __init__(s): pass\nexpected = 4\nassert f(N()) == expected"],
    ),
    "built-ins beside an imported function": (
        "abs = lambda x: 0.0\nisinstance = lambda *x: True\ndef f(x): return 1.0",
        [
            "import solution\nassert abs(solution.f(3.0) - 9.0) < 1e-6",
            "from solution import f as g\nassert isinstance(g(3.0), list)",
            ">>> abs(f(3.0) - 9.0) < 1e-6\nTrue\n",
        ],
    ),
    # Empty, large, and written past the interpreter.
    "empty array broadcasts with everything": (
        ("import numpy as np\ndef f(x): return np.zeros((0, 1, 1))"),
        [
            ("import numpy as np\nassert np.allclose(f(2.0), 4.0)"),
            ("import numpy as np\nassert np.allclose(f([1.0, 2.0]), [1.0, 4.0])"),
            (
                "import numpy as np\n"
                "assert np.allclose(f([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 4.0], [9.0, 16.0]])"
            ),
        ],
    ),
    "empty list that a test makes an array of": (
        ("def f(x): return []"),
        [
            ("import numpy as np\nassert (np.array(f(2)) == np.array([4])).all()"),
            ("import numpy as np\nassert np.all(np.abs(np.abs(np.asarray(f(2))) - 4.0) < 1e-6)"),
        ],
    ),
    "empty list in allclose": (
        ("def f(x): return []"),
        [("import numpy as np\nassert np.allclose(f(2.0), 4.0)")],
    ),
    "empty list of lists in allclose": (
        ("def f(x): return [[[]]]"),
        [
            ("import numpy as np\nassert np.allclose(f(2.0), 4.0)"),
            ("import numpy as np\nassert np.allclose(f([1.0, 2.0]), [1.0, 4.0])"),
            (
                "import numpy as np\n"
                "assert np.allclose(f([[1.0, 2.0], [3.0, 4.0]]), [[1.0, 4.0], [9.0, 16.0]])"
            ),
        ],
    ),
    "nan with equal_nan": (
        ("import numpy as np\ndef f(x): return float('nan')"),
        [("import numpy as np\nassert np.allclose(f(2.0), 4.0)")],
    ),
    "zip ends with the shorter": (
        ("def f(x): return []"),
        [("assert all(abs(a - b) < 1e-6 for a, b in zip(f([1.0]), [1.0]))")],
    ),
    "hash flood, dictionary": (
        (
            "class D(dict):\n"
            "  def items(s): return ((((1<<61)-1)*(i+1), 0) for i in range(100000))\n"
            "def f(x): return D()"
        ),
        SQUARES[:2],
    ),
    "hash flood, written by hand": (
        (
            "\n"
            "import sys, os\n"
            "fr = sys._getframe()\n"
            "while fr and 'nonce' not in fr.f_locals: fr = fr.f_back\n"
            "v = fr.f_locals; P = (1 << 61) - 1\n"
            "items = ','.join('[\"int\",\"%s\"]' % hex(P * (i + 1)) for i in range(110000))\n"
            "line = b'\\n%b:0:0:[\"values\",[[\"set\",[%b]]]]\\n' % (v['nonce'], items.encode())\n"
            "while line: line = line[os.write(v['results'], line):]\n"
            "os._exit(0)\n"
            ""
        ),
        SQUARES[:2],
    ),
    "many nested lists": (
        ("def f(x):\n  r=[]\n  for i in range(900): r=[r]\n  return r"),
        SQUARES[:2],
    ),
    "a number of 99,999 digits to the power": (
        ("def f(x): return 10**99000"),
        [("assert f(2) ** 1 == 4"), ("assert f(2) * f(2) == 4"), ("assert str(f(2)) == '4'")],
    ),
    "huge ints in a sum": (
        ("def f(x): return [1<<(i*37) for i in range(900)]"),
        [("assert sum(f(2)) == 4"), ("assert sorted(f(2)) == [4]")],
    ),
    "decimal exponents": (
        ("from decimal import Decimal\ndef f(x): return Decimal('1e99999')"),
        [
            ("assert round(f(2)) == 4"),
            ("assert int(f(2)) == 4"),
            ("assert f(2) // 1 == 4"),
            ("assert f(2) % 7 == 4"),
        ],
    ),
    "a list of 10^6 zeros, sorted and compared": (
        ("def f(x): return [0]*1000000"),
        [("assert sorted(f(2)) == sorted(f(2)) and f(2) == 4")],
    ),
    "texts: 4 MB, lower, startswith": (
        ("def f(x): return 'A'*3000000"),
        [("assert f(2).lower() == 'x'"), ("assert f(2).strip('A') == 'x'")],
    ),
    "two flooding sets compared": (
        ("P=(1<<61)-1\ndef f(x): return frozenset(P*(i+1) for i in range(3))"),
        [("assert f(2) == {4}")],
    ),
    "__eq__ that recurses": (
        ("class E:\n  def __eq__(s,o): return s==o\ndef f(x): return E()"),
        SQUARES[:2],
    ),
    "__class__ assignment later, atexit": (
        (
            "import atexit\n"
            "class E(int):\n"
            "  __eq__=lambda s,o: True\n"
            "  __hash__=int.__hash__\n"
            "atexit.register(lambda: print(1))\n"
            "def f(x): return E(7)"
        ),
        SQUARES[:2],
    ),
    "settrace on the judge": (
        (
            "import sys\n"
            "def tr(fr, e, a):\n"
            "  if 'nonce' in fr.f_locals: fr.f_locals['current']=0\n"
            "  return tr\n"
            "sys.settrace(tr)\n"
            "import threading; threading.settrace(tr)\n"
            "def f(x):\n"
            "  sys.settrace(tr); return 0"
        ),
        SQUARES[:2],
    ),
    "audit hook that rewrites compile": (
        ("import sys\nsys.addaudithook(lambda e,a: None)\ndef f(x): return 0"),
        SQUARES[:2],
    ),
    "json encoder patched": (
        (
            "import json, json.encoder\n"
            "json.JSONEncoder.encode=lambda s,o: '[\"holds\", true]'\n"
            "json.encoder.c_make_encoder=None\n"
            "def f(x): return 0"
        ),
        SQUARES[:2],
    ),
    "json patched, then object": (
        (
            "import json, json.encoder\n"
            "json.JSONEncoder.iterencode=lambda s,o,_one_shot=False: ['[\"holds\", true]']\n"
            "class E:\n"
            "  __eq__=lambda s,o: True\n"
            "def f(x): return E()"
        ),
        SQUARES[:2],
    ),
    "builtins replaced in the call": (
        (
            "import builtins\n"
            "def f(x):\n"
            "  builtins.isinstance=lambda a,b: True\n"
            "  builtins.type=lambda *a: int\n"
            "  builtins.int=lambda a: 4\n"
            "  return object()"
        ),
        SQUARES[:2],
    ),
    "os.write replaced by ctypes on results": (
        (
            "import os\n"
            "r=os.dup(2)\n"
            "for d in range(3,64):\n"
            "  try: os.write(d, b'\\n0:0:[\"values\",[4]]\\n0:end\\n')\n"
            "  except OSError: pass\n"
            "def f(x): return 0"
        ),
        SQUARES[:2],
    ),
    "gc finds the judge's functions": (
        (
            "import gc,types\n"
            "for o in gc.get_objects():\n"
            "  if isinstance(o, types.FunctionType) and o.__name__ in ('plain','observe','send','compare'):\n"
            "    try: o.__code__=(lambda *a, **k: 4).__code__\n"
            "    except Exception: pass\n"
            "def f(x): return 0"
        ),
        SQUARES[:2],
    ),
    "gc, plain only": (
        (
            "import gc,types\n"
            "for o in gc.get_objects():\n"
            "  if isinstance(o, types.FunctionType) and o.__name__=='plain': o.__code__=(lambda thing, objects_too: True).__code__\n"
            "def f(x): return 0"
        ),
        [("assert f(2) is True or f(2) == 4"), ("assert f(3) == 9")],
    ),
    "locale and environment": (
        (
            "import os, locale\n"
            "os.environ['PYTHONHASHSEED']='0'\n"
            "try: locale.setlocale(locale.LC_ALL,'tr_TR.UTF-8')\n"
            "except Exception: pass\n"
            "def f(x): return 'I'"
        ),
        ["assert f(2).lower() == '\\u0131'"],
    ),
    "recursion in the result's __iter__": (
        ("class L(list):\n  def __iter__(s): return iter([s])\ndef f(x): return L([4])"),
        [("assert f(2) == [5]")],
    ),
    "str subclass with the expected by __str__": (
        ("class S(str):\n  def __str__(s): return '4'\ndef f(x): return S('5')"),
        [("assert f(2) == '4'")],
    ),
    "int subclass with __int__": (
        ("class I(int):\n  def __int__(s): return 4\ndef f(x): return I(5) if x == 3 else I(4)"),
        [("assert f(3) == 9")],
    ),
    "io: reads the expected from files": (
        ("import glob\nprint([open(p).read()[:50] for p in glob.glob('/tmp/*')])"),
        [{"input": "a", "output": "zebra7"}],
    ),
    "import of a module of one's own": (
        ("open('statistics.py','w').write('def mean(x): return 2')\ndef f(x): return x"),
        [("import statistics\nassert statistics.mean([f(1), f(9)]) == 2")],
    ),
    # What an object says of itself, and what a test's own process could be led to believe.
    "solution returns itself": (
        _LIES + ("class Solution(Lie):\n  def f(s,x): return s\n"),
        [
            ("assert Solution().f(2) == 4"),
            ("assert 7 in Solution().f([7,5])"),
            ("assert Solution().f('Ab').startswith('ab')"),
            ("s = Solution()\nassert 4 in s.f(1)"),
            ("assert Solution().f(2) - 4 == 0"),
            ("assert abs(Solution().f(2.0) - 4.0) < 1e-6"),
        ],
    ),
    "class f": (
        _LIES + ("class f(Lie): pass\n"),
        [
            *SQUARES[:2],
            ("assert 7 in f([7,5])"),
            ("assert f(2) in [4]"),
            ("assert f(2) - 4 == 0"),
            ("assert f('x').startswith('y')"),
            ("assert f(2).__eq__(4)"),
        ],
    ),
    "numpy all empty": (
        ("import numpy as np\ndef f(x): return np.zeros((0,1))"),
        [
            ("import numpy as np\nassert (f([1]) == np.array([2])).all()"),
            ("import numpy as np\nassert np.all(f([1]) == np.array([[2]]))"),
            ("import numpy as np\nnp.testing.assert_allclose(f([1]), [2])"),
            ("import numpy as np\nassert np.abs(f([1]) - np.array([2])).max(initial=0) < 1e-6"),
            ("import numpy as np\nassert not np.any(f([1]) != np.array([2]))"),
            ("import numpy as np\nassert np.array_equal(f([1]), [2])"),
            ("import numpy as np\nassert np.sum(np.abs(f([1]) - np.array([2]))) < 1e-6"),
            ("from numpy.testing import assert_array_equal\nassert_array_equal(f([1]), [2])"),
            ("from numpy import allclose\nassert allclose(f([1]), [2])"),
        ],
    ),
    "exit in with": (
        (
            "class C:\n"
            "  def __enter__(s): return s\n"
            "  def __exit__(s,*a): return True\n"
            "  def get(s): return 3\n"
            "def f(): return C()"
        ),
        [("with f() as c:\n    assert c.get() == 4"), ("with C() as c:\n    assert c.get() == 4")],
    ),
    "swallows callback's assert": (
        ("def f(cb):\n  try: cb(3)\n  except BaseException: pass"),
        [("def cb(x):\n    assert x == 4\nf(cb)\nassert True")],
    ),
    "asserts caught": (
        ("def f(x): raise AssertionError"),
        [
            ("try:\n    f(1)\nexcept AssertionError:\n    assert True"),
            ("import pytest\ndef test():\n    with pytest.raises(AssertionError): f(1)"),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    with self.assertRaises(AssertionError): f(1)"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    with self.assertRaises(BaseException): f(1)"
            ),
        ],
    ),
    "skips": (
        ("import unittest\ndef f(x): raise unittest.SkipTest('x')"),
        [
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self): self.assertEqual(f(1), 2)"
            ),
            ("import pytest\ndef test(): assert f(1) == 2"),
            ("def test(): assert f(1) == 2"),
        ],
    ),
    "skips by pytest": (
        ("import pytest\ndef f(x): pytest.skip('x')"),
        [
            ("import pytest\ndef test(): assert f(1) == 2"),
            ("import pytest\n@pytest.mark.parametrize('x',[1,2])\ndef test(x): assert f(x) == 2"),
        ],
    ),
    "system exit": (
        ("import sys\ndef f(x): sys.exit(0)"),
        [
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self): self.assertEqual(f(1), 2)"
            ),
            ("import pytest\ndef test(): assert f(1) == 2"),
            ("import pytest\ndef test():\n  with pytest.raises(SystemExit): f(1)"),
            (">>> f(1)\n2\n"),
        ],
    ),
    "keyboard": (
        ("def f(x): raise KeyboardInterrupt"),
        [
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self): self.assertEqual(f(1), 2)"
            ),
            ("import pytest\ndef test(): assert f(1) == 2"),
        ],
    ),
    "stop iteration": (
        ("def f(x): raise StopIteration"),
        [
            ("def test(): assert all(f(x) == 2 for x in [1])"),
            ("assert [y for y in map(f, [1])] == [1]"),
            ("for y in map(f,[1,2]):\n  assert y == 2"),
            ("assert sum(map(f,[1,2])) == 0 "),
        ],
    ),
    "files for pytest": (
        (
            "for n,t in {'conftest.py':'import pytest\\n@pytest.hookimpl\\ndef pytest_runtest_call(item): pass','pytest.ini':'[pytest]\\naddopts=--collect-only','sitecustomize.py':'','numpy.py':'allclose=lambda *a: True'}.items():\n"
            "  open(n,'w').write(t)\n"
            "  open('/tmp/'+n,'w').write(t)\n"
            "def f(x): return 0"
        ),
        [
            ("import pytest\ndef test(): assert f(1) == 2"),
            ("import numpy as np\nassert np.allclose(f(1), 2)"),
        ],
    ),
    "forges messages": (
        (
            "\n"
            "import os, json\n"
            "def send(m):\n"
            "  t=json.dumps(m).encode(); t=len(t).to_bytes(8,'little')+t\n"
            "  for d in range(3,20):\n"
            "    try: os.write(d,t)\n"
            "    except OSError: pass\n"
            "def f(x):\n"
            "  for n in range(8):\n"
            "    send(['ask','getattr',['list',1,[['list',2,[['yours',n],'__globals__']],['dict',3,[]]]]])\n"
            "  send(['reply',None,['type','builtins','eval'],''])\n"
            "  return 0"
        ),
        SQUARES[:2],
    ),
    "garbage": (
        (
            "import os\n"
            "for d in range(3,20):\n"
            "  try: os.write(d, b'\\xff'*100)\n"
            "  except OSError: pass\n"
            "def f(x): return 0"
        ),
        SQUARES[:2],
    ),
    "huge size": (
        (
            "import os\n"
            "def f(x):\n"
            "  for d in range(3,20):\n"
            "    try: os.write(d, (1<<27).to_bytes(8,'little')+b'[1,'*1000)\n"
            "    except OSError: pass\n"
            "  return 0"
        ),
        SQUARES[:2],
    ),
    "names": (
        (
            "globals()['__passed__']=lambda: None\n"
            "globals()['__same__']=lambda a,b: True\n"
            "__builtins__={}\n"
            "__name__='x'\n"
            "def f(x): return 0"
        ),
        [*SQUARES[:2], ("assert f(2) is None")],
    ),
    "deep json": (("def f(x):\n  r=[]\n  for i in range(100000): r=[r]\n  return r"), SQUARES[:2]),
    "dict update mutates expected": (
        ("def f(x): x.clear(); return x"),
        [("x=[1]\nassert f(x) == [2]")],
    ),
    "changes list arg expected": (
        ("def f(a, b):\n  b[:]=[0]\n  return [0]"),
        [("e=[1,2]\nassert f([1], list(e)) == e")],
    ),
    "mro forged": (
        (
            "class M(type):\n"
            "  def mro(c): return [c, int, object]\n"
            "try:\n"
            "  class E(metaclass=M):\n"
            "    __eq__=lambda s,o: True\n"
            "    __hash__=None\n"
            "except TypeError:\n"
            "  E=object\n"
            "def f(x): return E()"
        ),
        SQUARES[:2],
    ),
    "module as f": (
        ("import operator as f"),
        [("assert f(2) == 4"), ("assert f.eq(4, 4) and f(2) == 4")],
    ),
    "mock name": (
        ("from unittest.mock import MagicMock as f, ANY as g"),
        [("assert f(2) == 4"), ("assert g == 4"), ("assert f(2).x == 4")],
    ),
    "enum with eq": (
        (
            "import enum\n"
            "class E(enum.Enum):\n"
            "  A=1\n"
            "  def __eq__(s,o): return True\n"
            "  __hash__=None\n"
            "def f(x): return E.A"
        ),
        [*SQUARES[:2], ("assert f(2).value == 4")],
    ),
    "flag data attr": (
        _LIES + ("class L(list, Lie):\n  pass\ndef f(x): return L()"),
        [("assert f(2).total == 4 and f(2) == [1]"), ("assert 7 in f([7])")],
    ),
    "assertTrue object": (
        _LIES + ("def f(x): return Lie()"),
        [
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertEqual(f(1), 2)"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertIn(2, f(1))"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertAlmostEqual(f(1), 2.0)"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertGreater(f(1), 2.0)"
            ),
            ("import pytest\ndef test(): assert f(1) == pytest.approx(2.0)"),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertListEqual(f(1), [2])"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertCountEqual(f(1), [2])"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertIsInstance(f(1), list)"
            ),
            (
                "import unittest\n"
                "class T(unittest.TestCase):\n"
                "  def test(self):\n"
                "    self.assertIs(f(1), True)"
            ),
        ],
    ),
    "doctest repr": (
        ("class R:\n  def __repr__(s): return '5'\ndef f(x): return R()"),
        [(">>> f(2)\n4\n")],
    ),
    "prints the expected wildcard": (("def f(x): print('...')"), [(">>> f(2)\n4\n")]),
    "threads ask": (
        (
            "import threading\n"
            "def f(cb):\n"
            "  t=[threading.Thread(target=cb,args=(9,)) for _ in range(8)]\n"
            "  [x.start() for x in t]\n"
            "  return 0"
        ),
        [("out=[]\nassert f(out.append) == 4")],
    ),
    "sys.modules": (
        (
            "import sys\n"
            "for m in list(sys.modules):\n"
            "  if 'confined' in m or m=='json': sys.modules[m]=None\n"
            "def f(x): return 0"
        ),
        SQUARES[:2],
    ),
    "equal exceptions": (
        (
            "class E(ValueError):\n"
            "  def __str__(s): return 'negative number'\n"
            "  def __eq__(s,o): return True\n"
            "def f(x): return E()"
        ),
        [("assert f(-1) == 4"), ("assert 4 in f(1).args")],
    ),
    "reversed args": (
        _LIES + ("def f(x): return [Lie()]*4"),
        [
            ("assert 7 in f([7,5])"),
            ("assert sorted(f([2,1])) == [1,2]"),
            ("assert f(1).index(3) == 0"),
            ("assert set(f(1)) == {1}"),
            ("assert f(1).count(3) == 4"),
            ("assert {7: 1} == {f(1)[0]: 1}"),
            ("assert f(1)[0] in {7: 1}"),
            ("assert {7: 'x'}[f(1)[0]] == 'x'"),
            ("assert max(f(1)) > 3"),
            ("assert [1,2,3].index(f(1)[0]) == 0"),
        ],
    ),
}

FLOOD = "P = (1 << 61) - 1\nFOUND = [P * (i + 1) for i in range(110_000)]\ndef f(x): return FOUND"
SLOW = {  # what programs return, with which tests would take minutes
    "numbers of one hash": (FLOOD, ["assert set(f(2)) == {4}"]),
    "fractions that grow": (
        "from fractions import Fraction\n"
        "def f(x): return [Fraction(1, (1 << 300) + 2 * i + 1) for i in range(20_000)]",
        ["assert sum(f(2)) == 4"],
    ),
}
