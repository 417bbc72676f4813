"""The options of a configuration as rows, read from the schema: the documents' tables are made of them."""

import json
from typing import Any, get_args, get_origin

from matrixlib.config import Section


def options_of(section: type[Section], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(dotted key, type, default, meaning) of every option, in schema order; the options page is made of it."""
    rows: list[tuple[str, str, str, str]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            rows += options_of(kind, f"{prefix}{name}.")
        else:
            default = "" if field.is_required() else _literal(field.default)
            rows.append((prefix + name, _kind(kind), default, field.description or ""))
    return rows


def _literal(value: Any) -> str:
    """A value as YAML has it."""
    return json.dumps(value)


def _kind(kind: Any) -> str:
    if kind is Ellipsis:
        return "..."
    if get_origin(kind) is tuple:
        return f"list of {_kind(get_args(kind)[0])}"
    if args := [a for a in get_args(kind) if not hasattr(a, "gt") and type(a).__name__ not in _METADATA]:
        parts = [repr(a) if isinstance(a, str) else _kind(a) for a in args]
        return " or ".join(dict.fromkeys(p for p in parts if p != "..."))
    return str(getattr(kind, "__name__", kind))


_METADATA = {"BeforeValidator", "FieldInfo", "Ge", "Gt", "Le", "Lt"}
