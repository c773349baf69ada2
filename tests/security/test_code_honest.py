"""Right programs, held to tests as the data sets of the field write them: all are paid. And what cannot be, as a list."""

# ruff: noqa: E501  (programs and tests as they are written, one to a line)

from __future__ import annotations

from typing import Any

import pytest

from leeway.envs.code_tests import code_tests
from leeway.envs.jail import why_not
from leeway.types import Task

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")]

# name: (program, tests). As in MBPP: assert statements, one by one.
STATEMENTS: dict[str, tuple[str, list[Any]]] = {
    "integers": ("def add(a, b): return a + b", ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]),
    "large integers": ("import math\ndef f(n): return math.factorial(n)", ["assert f(30) == 265252859812191058636308480000000"]),
    "huge integers": ("def f(n): return 7 ** n", ["assert f(9000) == 7 ** 9000"]),
    "floats": ("def half(x): return x / 2", ["assert half(5) == 2.5", "assert half(0.2) == 0.1"]),
    "floats, nearly": ("def area(r): return 3.14159265 * r * r", ["assert abs(area(2) - 12.566) < 1e-3"]),
    "math.isclose": ("import math\ndef vol(r): return 4 / 3 * math.pi * r ** 3", ["assert math.isclose(vol(10), 4188.790204786391, rel_tol=0.001)"]),
    "isclose, imported by the test": ("def f(x): return x ** 0.5", ["from math import isclose\nassert isclose(f(2), 1.41421356, rel_tol=1e-6)"]),
    "round": ("def mean(v): return sum(v) / len(v)", ["assert round(mean([1, 2, 4]), 2) == 2.33"]),
    "nan": ("def f(): return float('nan')", ["import math\nassert math.isnan(f())"]),
    "infinity": ("def f(): return float('-inf')", ["assert f() == float('-inf')"]),
    "complex numbers": ("import cmath\ndef polar(z): return cmath.polar(z)\ndef conj(z): return z.conjugate()", ["assert conj(1 + 2j) == 1 - 2j", "import cmath\nassert polar(1j) == cmath.polar(1j)"]),
    "booleans": ("def even(n): return n % 2 == 0", ["assert even(2) == True", "assert even(3) is False", "assert not even(5)"]),
    "a boolean from &": ("def odd(n): return n & 1", ["assert odd(3) == True", "assert odd(4) == False"]),
    "None": ("def find(v, x): return v.index(x) if x in v else None", ["assert find([1], 2) is None", "assert find([1], 1) == 0"]),
    "strings": ("def rev(s): return s[::-1]", ["assert rev('abc') == 'cba'", "assert rev('') == ''"]),
    "strings beyond ASCII": ("def up(s): return s.upper()", ["assert up('straße – ñ') == 'STRASSE – Ñ'"]),
    "methods of a returned string": ("def greet(n): return 'Hello ' + n", ["assert greet('Bo').startswith('Hello') and greet('Bo').lower() == 'hello bo'"]),
    "bytes": ("def enc(s): return s.encode()", ["assert enc('é') == b'\\xc3\\xa9'"]),
    "lists": ("def sq(v): return [x * x for x in v]", ["assert sq([1, 2]) == [1, 4]", "assert sq([]) == []"]),
    "lists of lists": ("def t(m): return [list(r) for r in zip(*m)]", ["assert t([[1, 2], [3, 4]]) == [[1, 3], [2, 4]]"]),
    "tuples": ("def swap(t): return (t[1], t[0])", ["assert swap((1, 'a')) == ('a', 1)"]),
    "lists of tuples": ("def srt(v): return sorted(v, key=lambda t: t[1])", ["assert srt([('a', 2), ('b', 1)]) == [('b', 1), ('a', 2)]"]),
    "sets": ("def shared(a, b): return set(a) & set(b)", ["assert shared([1, 2], [2, 3]) == {2}", "assert set(shared((1,), (1,))) == set([1])"]),
    "frozensets": ("def f(v): return frozenset(v)", ["assert f([1, 2]) == frozenset({2, 1})", "assert f([]) == set()"]),
    "dictionaries": ("def count(s): return {c: s.count(c) for c in s}", ["assert count('aab') == {'a': 2, 'b': 1}"]),
    "dictionaries with tuples as keys": ("def g(n): return {(i, i): [i] for i in range(n)}", ["assert g(2) == {(0, 0): [0], (1, 1): [1]}"]),
    "a Counter": ("from collections import Counter\ndef freq(v): return Counter(v)", ["assert freq([1, 1, 2]) == ({1: 2, 2: 1})", "assert freq('ab') == Counter('ab')"]),
    "a defaultdict": ("from collections import defaultdict\ndef group(v):\n    d = defaultdict(list)\n    for k, x in v: d[k].append(x)\n    return d", ["assert group([(1, 2), (1, 3)]) == {1: [2, 3]}"]),
    "an OrderedDict": ("from collections import OrderedDict\ndef f(): return OrderedDict(a=1)", ["assert f() == {'a': 1}"]),
    "a namedtuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef p(): return P(1, 2)", ["assert p() == (1, 2)"]),
    "an IntEnum": ("import enum\nclass C(enum.IntEnum):\n    RED = 1\ndef red(): return C.RED", ["assert red() == 1"]),
    "sorted": ("def uniq(v): return set(v)", ["assert sorted(uniq([3, 1, 3])) == [1, 3]"]),
    "len, sum, max": ("def rng(n): return list(range(n))", ["assert len(rng(4)) == 4 and sum(rng(4)) == 6 and max(rng(4)) == 3"]),
    "nested calls": ("def inc(x): return x + 1", ["assert inc(inc(inc(0))) == 3"]),
    "two functions": ("def enc(s): return [ord(c) for c in s]\ndef dec(v): return ''.join(map(chr, v))", ["assert dec(enc('hey')) == 'hey' and enc('a') == [97]"]),
    "keyword arguments": ("def f(a, *rest, b=2, **more): return [a, rest, b, more]", ["assert f(1, 5, b=3, c=4) == [1, (5,), 3, {'c': 4}]"]),
    "isinstance and type": ("def f(): return 3", ["assert isinstance(f(), int) and type(f()) is int"]),
    "in": ("def letters(): return ['a', 'b']", ["assert 'a' in letters() and 'z' not in letters()"]),
    "not None": ("class A: pass\ndef f(x): return A() if x else None", ["assert f(1) != None and f(0) == None and not f(1) == None"]),
    "any of several answers": ("def f(): return 2", ["assert f() in (1, 2, 3)"]),
    "a generator": ("def count(n):\n    for i in range(n): yield i", ["assert list(count(3)) == [0, 1, 2]", "g = count(2)\nassert next(g) == 0 and next(g) == 1 and next(g, None) is None"]),
    "an endless generator": ("def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1", ["from itertools import islice\nassert list(islice(naturals(), 3)) == [0, 1, 2]"]),
    "map and filter": ("def f(v): return map(str, v)", ["assert list(f([1, 2])) == ['1', '2']"]),
    "a range": ("def f(n): return range(n)", ["assert [x for x in f(3)] == [0, 1, 2] and len(f(3)) == 3"]),
    "a function as argument": ("def apply(f, v): return [f(x) for x in v]", ["assert apply(lambda x: x * 2, [1, 2]) == [2, 4]", "assert apply(len, ['ab']) == [2]", "assert apply(str, [1]) == ['1']"]),
    "a key function": ("def best(v, key): return max(v, key=key)", ["assert best(['a', 'bbb'], key=len) == 'bbb'"]),
    "a function returned": ("def adder(n): return lambda x: x + n", ["assert adder(3)(4) == 7"]),
    "an exception expected": ("def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5", ["try:\n    root(-1)\n    assert False, 'no error'\nexcept ValueError as error:\n    assert 'negative' in str(error)", "assert root(4) == 2"]),
    "an exception of Python's own": ("def div(a, b): return a / b", ["try:\n    div(1, 0)\nexcept ZeroDivisionError:\n    ok = True\nassert ok", "assert div(1, 2) == 0.5"]),
    "an exception of the program's, by its base": ("class Bad(KeyError): pass\ndef f(): raise Bad('x')", ["try:\n    f()\n    raise SystemExit\nexcept KeyError: pass"]),
    "sorted in place": ("def srt(v): v.sort()", ["v = [3, 1, 2]\nsrt(v)\nassert v == [1, 2, 3]"]),
    "a dictionary and a set changed in place": ("def put(d, s):\n    d['a'] = 1\n    s.add(2)", ["d, s = {}, set()\nput(d, s)\nassert d == {'a': 1} and s == {2}"]),
    "a matrix turned in place": ("def turn(m): m[:] = [list(r) for r in zip(*m[::-1])]", ["m = [[1, 2], [3, 4]]\nturn(m)\nassert m == [[3, 1], [4, 2]]"]),
    "arguments left alone": ("def first(v): return v.pop(0)", ["v = [1, 2]\nassert first(list(v)) == 1 and v == [1, 2]"]),
    "a constant": ("PRIMES = [2, 3, 5]", ["assert PRIMES == [2, 3, 5]"]),
    "a class": ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)", ["s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2 and len(s) == 1 and s.items == [1]"]),
    "a class with items": ("class Grid:\n    def __init__(self): self.d = {}\n    def __setitem__(self, k, v): self.d[k] = v\n    def __getitem__(self, k): return self.d[k]", ["g = Grid()\ng[1, 2] = 'x'\nassert g[1, 2] == 'x'"]),
    "a class with text": ("class P:\n    def __init__(self, x): self.x = x\n    def __str__(self): return f'P({self.x})'", ["assert str(P(3)) == 'P(3)' and f'{P(4)}' == 'P(4)'"]),
    "a dataclass": ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: int = 2\ndef p(): return P(1)", ["assert (p().x, p().y) == (1, 2)"]),
    "a linked list": ("class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\ndef build(v):\n    n = None\n    for x in reversed(v): n = Node(x, n)\n    return n\ndef flip(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p", ["n, seen = flip(build([1, 2, 3])), []\nwhile n:\n    seen.append(n.v)\n    n = n.next\nassert seen == [3, 2, 1]"]),
    "a cache of its own": ("from functools import lru_cache\n@lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)", ["assert fib(80) == 23416728348467685"]),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10**5)\ndef depth(n): return 0 if n == 0 else 1 + depth(n - 1)", ["assert depth(20000) == 20000"]),
    "a program that prints": ("print('hello')\ndef f(x):\n    print(x)\n    return x", ["assert f(1) == 1"]),
    "a main block that reads": ("def f(x): return x\nif __name__ == '__main__':\n    print(f(int(input())))", ["assert f(1) == 1"]),
    "a regular expression": ("import re\ndef words(s): return re.findall(r'\\w+', s)", ["assert words('a bc') == ['a', 'bc']"]),
    "whether something matches": ("import re\ndef m(s): return re.match('a+$', s)", ["assert m('aa')", "assert not m('ab')"]),
    "random, seeded": ("import random\ndef pick(v, seed): return random.Random(seed).choice(v)", ["assert pick([1, 2, 3], 0) in [1, 2, 3]"]),
    "threads": ("from concurrent.futures import ThreadPoolExecutor\ndef f(v):\n    with ThreadPoolExecutor(2) as pool: return list(pool.map(abs, v))", ["assert f([-1, 2]) == [1, 2]"]),
    "many threads": ("from concurrent.futures import ThreadPoolExecutor\ndef f(v):\n    with ThreadPoolExecutor() as pool: return list(pool.map(lambda x: sum(range(x)), v))", ["assert f(range(100)) == [sum(range(x)) for x in range(100)]"]),
    "a file of its own": ("def f(s):\n    with open('a.txt', 'w') as g: g.write(s)\n    return open('a.txt').read()", ["assert f('x') == 'x'"]),
    "a large list": ("def f(v): return sorted(v)", ["v = [(i * 7919) % 100003 for i in range(20000)]\nassert f(v) == sorted(v)"]),
    "a short sleep": ("import time\ndef f():\n    time.sleep(0.05)\n    return 1", ["assert f() == 1"]),
    "the name of a module": ("def copy(v): return list(v)\ndef string(x): return str(x)", ["assert copy([1]) == [1]", "assert string(1) == '1'"]),
    "a test with its own names": ("def f(x): return x * 2", ["def double(x): return x + x\nfor case in range(5): assert f(case) == double(case)"]),
    "a test that imports": ("def f(v): return list(v)", ["import random\nrng = random.Random(1)\nv = [rng.random()]\nassert f(v) == v"]),
}  # fmt: skip

CHECK = """METADATA = {'author': 'nobody', 'dataset': 'test'}


def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True, "first"
    assert candidate([1.0, 2.0, 3.9, 4.0], 0.05) == False
    for threshold in (0.01, 0.02): assert candidate([1.0, 1.0], threshold)
    assert True
"""
# As in HumanEval: a function `check` of the test, called with the program's.
CHECKED: dict[str, tuple[str, list[Any]]] = {
    "check(candidate)": ("from typing import List\n\n\ndef near(numbers: List[float], threshold: float) -> bool:\n    numbers = sorted(numbers)\n    return any(b - a < threshold for a, b in zip(numbers, numbers[1:]))", [CHECK + "\n\ncheck(near)\n"]),
    "a parameter of the same name": ("def near(a, b): return a + b", ["def check(near):\n    assert near(1, 2) == 3\ncheck(near)"]),
    "a comprehension in check": ("def is_prime(n): return n > 1 and all(n % i for i in range(2, n))", ["def check(candidate):\n    assert [n for n in range(20) if candidate(n)] == [2, 3, 5, 7, 11, 13, 17, 19]\ncheck(is_prime)"]),
    "math.fabs in check": ("def root(x): return x ** 0.5", ["def check(candidate):\n    import math, copy\n    for x in (1, 2, 3): assert math.fabs(candidate(x) ** 2 - x) < 1e-4\ncheck(root)"]),
    "tuples in check": ("def stats(v): return sum(v), max(v)", ["def check(candidate):\n    assert candidate([1, 2]) == (3, 2)\n    assert tuple(candidate((3,))) == (3, 3)\ncheck(stats)"]),
    "a closing exception in check": ("def f(s):\n    if not s: raise TypeError('empty')\n    return s", ["def check(candidate):\n    try:\n        candidate('')\n    except TypeError: pass\n    else: assert False\n    assert candidate('a') == 'a'\ncheck(f)"]),
}  # fmt: skip

# As in LiveCodeBench and APPS: a function and its arguments, or what is read and printed.
CALLS: dict[str, tuple[str, list[Any]]] = {
    "a call": ("def add(a, b): return a + b", [{"fn_name": "add", "input": [1, 2], "output": 3}]),
    "class Solution": ("from typing import *\nclass Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        seen = {}\n        for i, x in enumerate(nums):\n            if target - x in seen: return [seen[target - x], i]\n            seen[x] = i", [{"fn_name": "twoSum", "input": [[2, 7, 11], 9], "output": [0, 1]}]),
    "a tuple for a list": ("def f(x): return x, [x]", [{"fn_name": "f", "input": [1], "output": [1, [1]]}]),
    "a float that is whole": ("def f(x): return x / 2", [{"fn_name": "f", "input": [4], "output": 2}]),
    "an object": ("def f(x): return {'a': [x, None, True]}", [{"fn_name": "f", "input": ["x"], "output": {"a": ["x", None, True]}}]),
    "no result": ("def f(x): pass", [{"fn_name": "f", "input": [1], "output": None}]),
}  # fmt: skip
PRINTED: dict[str, tuple[str, list[Any]]] = {
    "input": ("a, b = map(int, input().split())\nprint(a + b)", [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]),
    "sys.stdin": ("import sys\nprint(sum(int(line) for line in sys.stdin))", [{"input": "1\n2\n3\n", "output": "6"}]),
    "open(0)": ("n, *v = map(int, open(0).read().split())\nprint(max(v))", [{"input": "3\n1 9 2\n", "output": "9\n"}]),
    "sys.stdin.buffer": ("import sys\nprint(len(sys.stdin.buffer.read().split()))", [{"input": "a b\nc", "output": "3"}]),
    "a fast input": ("import sys, os, io\ninput = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(int(input()) + int(input()))", [{"input": "1\n2\n", "output": "3"}]),
    "a main function": ("def main():\n    print(input()[::-1])\nif __name__ == '__main__':\n    main()", [{"input": "abc\n", "output": "cba"}]),
    "a thread with a large stack": ("import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\ndef main(): print(int(input()) * 2)\nt = threading.Thread(target=main)\nt.start()\nt.join()", [{"input": "4", "output": "8"}]),
    "exit() in the middle": ("import sys\nprint('NO')\nsys.exit()\nprint('YES')", [{"input": "", "output": "NO"}]),
    "quit at the end": ("import sys\nsys.stdout.write('1\\n2\\n')\nsys.exit(0)", [{"input": "", "output": "1\n2"}]),
    "white space at line ends": ("print(1, end=' \\n')\nprint(2)", [{"input": "", "output": "1\n2 \n\n"}]),
    "no input left": ("try:\n    while True: print(int(input()) ** 2)\nexcept EOFError: pass", [{"input": "1\n2\n", "output": "1\n4"}]),
    "much output": ("print('\\n'.join(map(str, range(50000))))", [{"input": "", "output": "\n".join(map(str, range(50000)))}]),
    "beyond ASCII": ("print(input().upper())", [{"input": "é\n", "output": "É"}]),
}  # fmt: skip

HONEST = STATEMENTS | CHECKED | CALLS | {f"printed: {name}": case for name, case in PRINTED.items()}

# What a right program is not paid for, as docs/environments.md says, because only the program could judge it.
UNPAID: dict[str, tuple[str, str]] = {
    "two objects compared": ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int", "assert P(1) == P(1)"),
    "a sum of objects": ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)", "assert (V(1) + V(2)).x == 3"),
    "a Fraction returned": ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "assert f() == Fraction(1, 2)"),
    "an exception of the program's own": ("class Bad(Exception): pass\ndef f(): raise Bad", "try:\n    f()\nexcept Bad: pass"),
    "an object of the test": ("def f(p): return p.x", "class P: x = 1\nassert f(P()) == 1"),
    "an iterator as argument": ("def f(v): return next(v)", "assert f(iter([1, 2])) == 1"),
    "isinstance of a class": ("class A: pass\ndef f(): return A()", "assert isinstance(f(), A)"),
}  # fmt: skip


def pay(program: str, tests: list[Any]) -> float:
    return code_tests(Task(task_id="t", prompt="p", info={"tests": tests}), f"So:\n```python\n{program}\n```\n")


@pytest.mark.honest
@pytest.mark.parametrize("name", HONEST)
def test_a_right_program_is_paid(name: str) -> None:
    assert pay(*HONEST[name]) == 1.0


@pytest.mark.parametrize("name", UNPAID)
def test_what_only_the_program_could_judge_is_not_paid(name: str) -> None:
    program, test = UNPAID[name]
    assert pay(program, [test]) == 0.0
