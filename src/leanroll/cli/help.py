"""`--help` from the schema: every option with its type, default and meaning."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from pydantic import BaseModel

from leanroll.config import iter_fields


def options_text(schema: type[BaseModel]) -> str:
    """The options of a recipe by section, wrapped to the terminal."""
    width = min(shutil.get_terminal_size().columns, 120) - 2
    lines = [
        "options of the recipe, as --KEY VALUE or --KEY=VALUE (TOML values or plain words; null: back to the default):"
    ]
    section = ""
    for field in iter_fields(schema):
        head = field.key.partition(".")[0] if "." in field.key else ""
        if head != section:
            section = head
            lines += ["", f"[{section}]" if section else "(top level)"]
        lines.append(f"  --{field.key}  {field.type}  (default: {field.default})")
        lines += textwrap.wrap(field.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def wants_help(arguments: Sequence[str]) -> bool:
    """Whether `-h` or `--help` is among the arguments."""
    return "-h" in arguments or "--help" in arguments
