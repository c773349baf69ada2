"""What crosses the wall of a jail: values of Python's own data types, written as JSON, and never an object with code.

The reader builds every value itself, so that each has exactly the type it says: `True` is no int, and there are no
subclasses. Loaded as a file by `jail_process.py`: imports nothing of the package.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2**20
"""Of one value written down, unless the reader allows another size."""
MAX_DEPTH = 100

_SMALL = 2**63  # larger integers are written in hexadecimal: JSON's are limited to a number of digits
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}

Other = Callable[[Any], Any]
"""Writes an object that is no data as something that is (a number that stands for it), or reads that back."""


def dumps(value: Any, other: Other | None = None) -> bytes:
    """A value of None, bool, int, float, complex, str, bytes, list, tuple, range, set, frozenset, dict; subclasses as
    their base. Raises ValueError for other objects (unless `other` names them) and for depth above `MAX_DEPTH`."""
    return json.dumps(_write(value, other, 0), separators=(",", ":")).encode()


def loads(data: bytes, other: Other | None = None, *, max_keys: int | None = None, nan: bool = True) -> Any:
    """The value that `dumps` wrote. Raises ValueError for anything else, whoever wrote it.

    `max_keys` limits sets and keys that are no strings: numbers can be chosen so that their hashes are the same, which
    makes ten thousand of them take seconds. Without `nan`, none is read.
    """
    try:
        return _Reader(other, max_keys).read(json.loads(data, parse_constant=float if nan else _no_nan), 0)
    except (RecursionError, TypeError, KeyError, AttributeError) as error:  # not of the form; a list as a key
        raise ValueError(f"no data: {type(error).__name__}") from None


def _write(value: Any, other: Other | None, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    depth += 1
    if isinstance(value, int):
        value = int.__int__(value)
        return value if -_SMALL <= value < _SMALL else {"int": f"{value:x}"}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [_write(item, other, depth) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[_write(k, other, depth), _write(v, other, depth)] for k, v in dict.items(value)]}
    for name, base in _SEQUENCES.items():
        if isinstance(value, base):
            return {name: [_write(item, other, depth) for item in base.__iter__(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).decode("latin-1")}
    if kind is range:
        return {"range": [_write(number, other, depth) for number in (value.start, value.stop, value.step)]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return _write(value.item(), other, depth)
    if other is None:
        raise ValueError(f"{kind.__name__} is no data")
    return {"other": other(value)}


class _Reader:
    def __init__(self, other: Other | None, max_keys: int | None) -> None:
        self._other, self._max_keys = other, max_keys

    def read(self, item: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"deeper than {MAX_DEPTH} levels")
        depth += 1
        if isinstance(item, list):
            return [self.read(part, depth) for part in item]
        if not isinstance(item, dict):
            return item
        ((name, content),) = item.items()
        if name == "tuple":
            return tuple([self.read(part, depth) for part in _expect(content, list)])
        if name in _SEQUENCES:
            return _SEQUENCES[name](self._keys([self.read(part, depth) for part in _expect(content, list)]))
        if name == "dict":
            pairs = [(self.read(k, depth), self.read(v, depth)) for k, v in _expect(content, list)]
            self._keys([k for k, _ in pairs])
            return dict(pairs)
        if name == "int":
            return int(_expect(content, str), 16)
        if name == "bytes":
            return _expect(content, str).encode("latin-1")
        if name == "range":
            return range(*[self.read(number, depth) for number in _expect(content, list)])
        if name == "complex":
            real, imaginary = _expect(content, list)
            return complex(_expect(real, float), _expect(imaginary, float))
        if name == "other" and self._other is not None:
            return self._other(content)
        raise ValueError(f"no data: {name[:20]!r}")

    def _keys(self, keys: list[Any]) -> list[Any]:
        if self._max_keys is not None and sum(type(key) is not str for key in keys) > self._max_keys:
            raise ValueError(f"more than {self._max_keys} keys that are no strings")
        return keys


def _no_nan(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN")
    return float(name)


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"no data: {type(value).__name__} instead of {kind.__name__}")
    return value


def send(fd: int, data: bytes) -> None:
    """One message: its length in four bytes, then itself."""
    left = memoryview(struct.pack("I", len(data)) + data)
    while left:
        left = left[os.write(fd, left) :]


def receive(fd: int, limit: int = MAX_BYTES) -> bytes:
    """The next message. Raises ConnectionError at the end of the stream, ValueError above `limit` bytes."""
    (size,) = struct.unpack("I", _exactly(fd, 4))
    if size > limit:
        raise ValueError(f"a message of {size} bytes; at most {limit} are read")
    return _exactly(fd, size)


def _exactly(fd: int, size: int) -> bytes:
    parts, missing = [], size
    while missing:
        part = os.read(fd, min(missing, 2**20))
        if not part:
            raise ConnectionError("the other side has ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
