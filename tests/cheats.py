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
_FRAMES = """
import sys
def values():
    frame = sys._getframe(1)
    while frame:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            yield name, value
        frame = frame.f_back
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
}
