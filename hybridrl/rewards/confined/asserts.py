"""Runs a program and then tests of it, in one sandboxed process. Sent there as text, by `code`,
behind `plain` and `comparing`, whose functions it uses."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .comparing import make_compare
    from .plain import ObjectFoundError, plain

# The program may replace whatever it can reach, so nothing that a verdict depends on is looked up
# once it has begun: what is needed later is bound to local names first.


def judge(
    program: str, needs: list[str], tests: list[str], names: tuple[str, str], nonce: bytes
) -> NoReturn:
    """Writes to the standard output, each in a line that begins with the nonce and the test's
    number: what the test observes, as JSON, and that its end was reached.

    Args:
        program: its source.
        needs: modules to import first, so that the program cannot replace them unseen.
        tests: sources, in which `observe(number, operators, *functions)` asks for what is judged
            outside: what the functions return, which `operators` compare if there are any. With
            `made_of`, only if there was an object among the observations of these numbers. And
            `compare(operators, operands)` stands for a comparison that is judged here.
        names: of `observe` and `compare`, such that the program could not know them.
        nonce: what the program must not know.
    """
    for name in needs:
        with contextlib.suppress(ImportError):  # the program will find that out
            __import__(name)
    run, translate, number, anything = exec, compile, enumerate, BaseException
    write, leave, dictionary = os.write, os._exit, dict
    untrace, unprofile = sys.settrace, sys.setprofile
    builtin_names, originals = vars(builtins), dict(vars(builtins))
    compare, plain_data, object_found = make_compare(), plain, ObjectFoundError
    encode = json.JSONEncoder(check_circular=False).encode
    results = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 1)  # what the program prints counts neither as a result nor as output
    os.dup2(nowhere, 2)
    module = type(sys)("program")
    sys.modules["program"] = module  # where dataclasses and pickle look for its classes
    module_names = vars(module)

    def send(what: bytes) -> None:
        line = b"\n%b:%d:%b\n" % (nonce, current, what)
        while line:
            line = line[write(results, line) :]

    with_objects = set()  # numbers of observations of the test in hand

    def observe(
        k: int,
        operators: tuple[str, ...],
        *functions: Callable[[], Any],
        made_of: tuple[int, ...] | None = None,
    ) -> Any:
        found: list[Any] = [None]
        try:
            if made_of is not None and with_objects.isdisjoint(made_of):
                return None
            found = [function() for function in functions]
            try:
                answer = ["values", [plain_data(thing, not operators) for thing in found]]
            except object_found:
                answer = ["holds", bool(compare(operators, found))]
            text = encode(answer)
            if '["object", ' in text:
                with_objects.add(k)
            send(b"%d:%b" % (k, text.encode()))
        except anything:  # nothing was observed, so the verdict is against the program
            pass
        return found[0]

    try:
        run(translate(program, "program.py", "exec", dont_inherit=True), module_names)
        untrace(None)
        unprofile(None)
        builtin_names.update(originals)
        scope = dictionary(module_names)
        scope[names[0]], scope[names[1]] = observe, compare
    except anything:  # a SystemExit too: a program that ends before its tests fails them
        leave(1)
    for current, test in number(tests):  # noqa: B007 (`send` reads it)
        with_objects.clear()
        try:
            run(translate(test, "test.py", "exec", dont_inherit=True), scope)
        except anything:
            continue
        send(b"end")
    leave(0)
