"""what a JSON file contains → a value of a type, checked; or an error that names the file and the field."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from ngramloss.errors import UserError

LARGEST = 2**63  # Whole numbers must be below this, as in a tensor
_NOUNS = {
    str: "text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    NoneType: "null",
    list: "a list",
    tuple: "a list",
}


def typed(kind: Any, value: Any, what: str | Path, advice: str = "") -> Any:
    """What was read from a file, as a value of a type; an error names the file (``what``) and the field.

    >>> typed(dict[str, float | None], {"a": "b"}, "x.json")
    Traceback (most recent call last):
    ...
    ngramloss.errors.UserError: x.json: a should be a finite number or null, got 'b'.
    """
    try:
        return _typed(kind, value, "")
    except TypeError as reason:
        raise UserError(f"{what}: {reason}. {advice}".rstrip()) from None


def _typed(kind: Any, value: Any, name: str) -> Any:
    """The value in its type. Raises ``TypeError`` with the name of its field."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any or (isinstance(kind, type) and type(value) is kind and kind not in (int, float)):
        return value
    if origin is UnionType:
        if value is None and NoneType in inner:
            return None
        likely = [each for each in inner if _is_like(each, value)]
        if len(likely) == 1:
            return _typed(likely[0], value, name)
    elif _is_like(kind, value):
        if origin is float:
            return float(value)
        if origin is Path:
            return Path(value)
        if origin in (list, tuple):
            return origin(_typed(inner[0], item, f"{name}[{index}]") for index, item in enumerate(value))
        if origin in (dict, Mapping):
            if inner[0] is int and (wrong := [key for key in value if not (key.isdecimal() and len(key) < 19)]):
                raise TypeError(f"{name or 'it'} should have whole numbers as keys, got {_short(wrong[0])}")
            return {inner[0](key): _typed(inner[1], item, _join(name, key)) for key, item in value.items()}
        if isinstance(value, dict):
            return _fields(kind, value, name)
        return value
    raise TypeError(f"{name or 'it'} should be {_noun(kind)}, got {_short(value)}")


def _is_like(kind: Any, value: Any) -> bool:
    """Whether JSON has values of this type so."""
    origin = get_origin(kind) or kind
    if origin in (int, float):
        number = type(value) is int and abs(value) < LARGEST
        return number or (origin is float and type(value) is float and math.isfinite(value))
    if origin in (str, bool, NoneType):
        return type(value) is origin
    if origin is Path:
        return isinstance(value, str)
    return isinstance(value, list if origin in (list, tuple) else dict)


def _fields(kind: Any, content: Mapping[str, Any], name: str) -> Any:
    types = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        needed = {each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING}
    else:
        needed = set(kind.__required_keys__ if is_typeddict(kind) else types.keys() - kind._field_defaults.keys())
    if missing := [field for field in types if field in needed - content.keys()]:
        raise TypeError(f"{name or 'it'} has no {', '.join(missing)}")
    if unknown := [field for field in content if field not in types]:
        raise TypeError(f"{name or 'it'} has the unknown field {_short(unknown[0])}")
    return kind(**{field: _typed(types[field], item, _join(name, field)) for field, item in content.items()})


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def _noun(kind: Any) -> str:
    if get_origin(kind) is UnionType:
        return " or ".join(map(_noun, get_args(kind)))
    return _NOUNS.get(get_origin(kind) or kind, "an object")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
