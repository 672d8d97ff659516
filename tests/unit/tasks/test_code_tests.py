from __future__ import annotations

import ast
from typing import Any

import pytest

from leanroll.sandbox.harness import RECORD
from leanroll.tasks.code_tests import defines_check, program_of, record_asserts

SIGNATURE = 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Twice x."""\n'
WHOLE = "def f(x):\n    return 2 * x\n"


@pytest.mark.parametrize(
    "completion",
    [
        "    return 2 * x\n",
        "\n\n    return 2 * x\n\nprint(f(1 / 0))\n",
        "return 2 * x",
        "y = x\n    return y + x\n\n\n# Now the tests:\nassert False",
        "for y in [x]:\n        return 2 * helper(y)",
        WHOLE,
        f"import math\n\n{WHOLE}",
        f"Here:\n\n```python\n{WHOLE}```\nIt doubles.",
        f"```\n{WHOLE}```",
        f"```py\n{WHOLE}",
        f"```Python\ndef f(x):\n    return 0\n```\nBetter:\n```python\n{WHOLE}```\n```python\nprint(f(1))\n```",
        f"```bash\nrm -rf /\n```\n```python\n{WHOLE}```\n```text\n2\n```",
        f"~~~python\n{WHOLE}~~~",
        f"````python\n{WHOLE}````",
        "1. So:\n   ```python\n   def f(x):\n       return 2 * x\n   ```",
        "```python\n    return 2 * x\n```",
        "```python\ny = x\nreturn x + y\n```",
        f"```python\nfrom __future__ import annotations\n{WHOLE}```",
        "```python\nf = lambda x: 2 * x\n```",
        "```python\r\ndef f(x):\r\n    return 2 * x\r\n```",
    ],
)
def test_a_program_is_found(completion: str) -> None:
    names: dict[str, Any] = {}
    exec(program_of(completion, "f", SIGNATURE), names)
    assert names["f"](3) == 6
    assert names["helper"](1) == 1


@pytest.mark.parametrize(
    ("completion", "program"), [("x = 1", "x = 1\n"), ("```\nx = 1\n```", "x = 1\n\n"), ("", "\n")]
)
def test_without_a_signature_the_text_is_the_program(completion: str, program: str) -> None:
    assert program_of(completion, "", "") == program


def recorded(tests: str, **names: Any) -> tuple[dict[int, bool], int]:
    source, total = record_asserts(tests)
    held: dict[int, bool] = {}
    names[RECORD] = lambda number, ok: held.update({number: held.get(number, True) and ok})
    exec(source, names)
    return held, total


def test_asserts_are_recorded_and_go_on() -> None:
    tests = (
        "assert True, 'not counted'\nassert f(1) == 1\nassert f(2) == 0, 'message'\n"
        "for i in range(3):\n    assert i < 2\n    assert i < 3\ndef g():\n    assert 1 / 0\ng()\nif f(0):\n    assert f(0)\n"
    )
    assert recorded(tests, f=lambda x: x) == ({0: True, 1: False, 2: False, 3: True, 4: False}, 6)
    assert recorded("x = 1") == ({}, 0)


def test_leaving_is_not_recorded() -> None:
    def leave() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        recorded("assert f()", f=leave)


def test_check_is_found_at_the_top_level_only() -> None:
    assert defines_check("x = 1\ndef check(candidate):\n    pass")
    assert not defines_check("class A:\n    def check(self): pass\ncheck = 1")
    with pytest.raises(SyntaxError):
        defines_check("def")
    assert ast.parse(record_asserts("assert x")[0])
