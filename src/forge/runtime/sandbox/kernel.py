"""The Python kernel of a sandbox: it runs one piece of code after another, and keeps their variables.

It is not imported by the library: its text is run inside a sandbox, by whatever Python is there. `argv` has the
descriptors of requests and records, the most characters of a record's texts, and the work folder. A request is a JSON
string and a NUL byte, a record a JSON object and a NUL byte.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import sys
import traceback
import types
from typing import Any


def cut(text: str, limit: int) -> str:
    """Return a text without its middle where it is too long."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def run_cell(code: str, name: str, space: dict[str, Any]) -> Any:
    """Run code in a namespace and return the value of its last statement, where that is an expression."""
    tree = ast.parse(code, name)
    last, final = None, tree.body[-1] if tree.body else None
    if isinstance(final, ast.Expr):
        tree.body.pop()
        last = ast.Expression(final.value)
    exec(compile(tree, name, "exec"), space)
    return None if last is None else eval(compile(last, name, "eval"), space)


def explain(error: BaseException, name: str) -> str:
    """Return a traceback that starts in the code that was given."""
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code.co_filename != name:
        place = place.tb_next
    return "".join(traceback.format_exception(type(error), error, place)).strip()


def answer(code: str, name: str, space: dict[str, Any], limit: int) -> dict[str, str | None]:
    """Run code and return its record."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    record: dict[str, str | None] = {"value": None, "error": None}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        value = run_cell(code, name, space)
        if value is not None:
            space["_"] = value
            record["value"] = cut(repr(value), limit)
    except BaseException as error:  # noqa: BLE001 - the code's own
        try:
            record["error"] = cut(explain(error, name), limit)
        except BaseException as second:  # noqa: BLE001 - an exception that cannot be shown, or no memory left to show it
            names = (type(error).__name__, type(second).__name__)
            record["error"] = "{} (and its traceback cannot be shown: {})".format(*names)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # noqa: BLE001 - closed or replaced by the code
            continue
    return record


def main() -> None:
    """Answer requests until there are no more."""
    requests, records, limit, work = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (requests, records):
        os.set_inheritable(descriptor, False)
    os.chdir(work)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv[:] = [""]
    sys.path.insert(0, "")
    owner, waiting, number = os.getpid(), b"", 0
    while True:
        while b"\0" not in waiting:
            data = os.read(requests, 65536)
            if not data:
                os._exit(0)
            waiting += data
        request, _, waiting = waiting.partition(b"\0")
        number += 1
        record = answer(json.loads(request), f"<cell {number}>", module.__dict__, limit)
        if os.getpid() != owner:  # a fork that ran to the end of the code
            os._exit(0)
        rest = json.dumps(record).encode("ascii") + b"\0"
        while rest:
            rest = rest[os.write(records, rest) :]


if __name__ == "__main__":
    main()
