"""Programs and tests as text: which part of a completion is the program, and tests that record each assert."""

from __future__ import annotations

import ast
import re
import textwrap

from leanroll.sandbox.harness import RECORD

_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+.-]*)[^\n]*$", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_INDENT = "    "


def program_of(completion: str, entry_point: str, signature: str) -> str:
    """The program in a completion, with `signature` before it.

    1. Fenced blocks, unlabelled or labelled python (python3, py): the last one that defines `entry_point`, else the last one, which
       may then be the body alone (indented, or with a `return` at its top level). A fence that is not closed reaches to the end.
    2. No such block, and the text defines `entry_point` at the start of a line: all of the text.
    3. Neither: the text continues `signature`, up to its first line that is not indented (white space at its very beginning, which
       chat formats drop, is put back). Without a signature: all of the text.

    Args:
        entry_point: name of the function or class asked for; empty if the tests name none.
        signature: code that the prompt showed: imports, helpers, and the function's head with its docstring. It is put before the
            program, whose definitions replace it. May be empty.
    """
    blocks = _blocks(completion)
    if not blocks:
        continues = bool(signature) and not _defines(completion, entry_point)
        return _join(signature, _body(completion) if continues else completion)
    defining = [block for block in blocks if _defines(block, entry_point)]
    block = (defining or blocks)[-1]
    if signature and not defining and re.match(r"\s*\n?[ \t]+\S", block):
        block = _body(block)
    elif signature and not defining and re.search(r"^return\b", block, re.MULTILINE):
        block = textwrap.indent(block, _INDENT)
    return _join(signature, block)


def record_asserts(tests: str) -> tuple[str, int]:
    """Tests whose asserts are recorded one by one, and go on after one that fails.

    Asserts of constants (`assert True`) stay as they are and do not count.

    Returns:
        The new source, and the number of asserts that count.

    Raises:
        SyntaxError: the tests are not Python.
    """
    recorder = _Recorder()
    tree = recorder.visit(ast.parse(tests))
    return ast.unparse(ast.fix_missing_locations(tree)), recorder.count


def defines_check(tests: str) -> bool:
    """Whether the tests define check(...) at their top level. Raises SyntaxError."""
    return any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in ast.parse(tests).body)


class _Recorder(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return node
        record = f"try: pass\nexcept Exception: {RECORD}({self.count}, False)\nelse: {RECORD}({self.count}, True)"
        wrapped = ast.parse(record).body[0]
        assert isinstance(wrapped, ast.Try)
        wrapped.body = [node]
        self.count += 1
        return ast.copy_location(wrapped, node)


def _blocks(text: str) -> list[str]:
    blocks, position = [], 0
    while opening := _FENCE.search(text, position):
        fence, label = opening[1], opening[2]
        closing = re.compile(rf"^[ \t]*{fence[0]}{{{len(fence)},}}[ \t]*$", re.MULTILINE).search(text, opening.end())
        if label.lower() in _PYTHON:
            block = text[opening.end() + 1 : closing.start() if closing else len(text)]
            blocks.append(textwrap.dedent(block) if text[opening.start()].isspace() else block)
        if closing is None:
            break
        position = closing.end()
    return blocks


def _defines(code: str, name: str) -> bool:
    name = re.escape(name)
    return bool(name) and bool(re.search(rf"^(?:(?:async +)?def|class) +{name}\b|^{name} *=", code, re.MULTILINE))


def _body(text: str) -> str:
    """The lines of a function's body: up to the first one, after the very first, that is not indented."""
    lines = text.strip("\n").splitlines()
    if lines and lines[0] and not lines[0][0].isspace():
        lines[0] = _INDENT + lines[0]
    ends = (number for number, line in enumerate(lines) if line.strip() and not line[0].isspace())
    return "\n".join(lines[: next(ends, len(lines))])


def _join(signature: str, body: str) -> str:
    if not signature:
        return f"{body}\n"
    future = _FUTURE.findall(body)  # has to come first in a file
    return "\n".join([*future, signature.rstrip(), _FUTURE.sub("", body), ""])
