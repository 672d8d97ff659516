"""The fields of a recipe as data: for `--help`, for suggestions, and for telling tables from values."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One option: its dotted key, its type in words, its default as TOML would write it (`-` for None), its meaning."""

    key: str
    type: str
    default: str
    description: str


def iter_fields(model: type[BaseModel], prefix: str = "") -> Iterator[FieldDoc]:
    """Every leaf field of a schema, in declaration order."""
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is not None:
            yield from iter_fields(section, f"{prefix}{name}.")
        else:
            default = info.get_default(call_default_factory=True)
            yield FieldDoc(
                f"{prefix}{name}", type_text(info.annotation), _default_text(default), info.description or ""
            )


def option_keys(model: type[BaseModel]) -> list[str]:
    """Dotted keys of every leaf field."""
    return [field.key for field in iter_fields(model)]


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The nested model of a field that is a table, else None."""
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def field_at(model: type[BaseModel], path: Iterable[str]) -> FieldInfo | None:
    """The field at a path of names, None when there is none (or when the path leads below a leaf)."""
    current: type[BaseModel] | None = model
    info: FieldInfo | None = None
    for part in path:
        if current is None or part not in current.model_fields:
            return None
        info = current.model_fields[part]
        current = section_of(info)
    return info


def nearest_key(model: type[BaseModel], key: str) -> str | None:
    """The known key that `key` most likely meant: same table first, then the same last part anywhere, then any spelling."""
    keys = option_keys(model)
    sections = sorted({k.rpartition(".")[0] for k in keys if "." in k})
    head, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in keys if k.rpartition(".")[0] == head}
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6)
    if close:
        return siblings[close[0]]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    if same_leaf:
        return same_leaf[0]
    leaves = {k.rpartition(".")[2]: k for k in keys}
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    if close:
        return leaves[close[0]]
    close = difflib.get_close_matches(key, keys + sections, n=1, cutoff=0.5)
    return close[0] if close else None


def type_text(annotation: Any) -> str:
    """A type as a person would write it: `int`, `"a" | "b"`, `list of str`."""
    origin = get_origin(annotation)
    if origin is typing.Annotated:
        return type_text(get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(a) for a in get_args(annotation) if a is not type(None))
    if origin is tuple:
        items = [a for a in get_args(annotation) if a is not Ellipsis]
        if Ellipsis in get_args(annotation):
            return f"list of {type_text(items[0])}"
        return f"list of {len(items)} {type_text(items[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return {"str": "text"}.get(annotation.__name__, annotation.__name__)


def _default_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if value else '""'
    if isinstance(value, tuple):
        return "[" + ", ".join(_default_text(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{}"
    return f"{value:g}" if isinstance(value, float) else str(value)
