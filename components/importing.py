"""Names given in a config, "package.module:attribute", turned into the objects they name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def import_named(name: str, builtin: Mapping[str, str], *, key: str, expected: str) -> Any:
    """The object of a built-in name, or as `import_user_object`."""
    if name not in builtin and ":" not in name:
        known = f"one of {', '.join(builtin)}, or {expected} as 'package.module:name'"
        raise ValueError(f"{key}: got {name!r}, expected {known}")
    return import_user_object(builtin.get(name, name), key=key, expected=expected)


def import_user_object(name: str, *, key: str, expected: str) -> Any:
    """The object named "package.module:attribute".

    Raises ValueError in one line that names the config key, the file and what was expected there.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ValueError(
                f"{key}: got {name!r}, but there is no module {error.name!r}; expected an installed package, or "
                f"{module_name.replace('.', '/')}.py in the folder where leeway is started or in one of `plugins`"
            ) from None
        raise ValueError(
            f"{key}: {_place_of(error, module_name)} cannot be imported: {error}; install what it needs"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{key}: {_place_of(error, module_name)} cannot be imported: {type(error).__name__}: {error}; "
            f"expected {expected}"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{key}: {module.__file__} has no {attribute!r}; expected {expected} of that name")
    return getattr(module, attribute)


def check_call(function: Any, name: str, *arguments: str, options: Mapping[str, Any], key: str, expected: str) -> None:
    """Raise ValueError in one line, now rather than at the first use, if it cannot be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise ValueError(
            f"{key}: {name!r}{where} cannot be called with ({', '.join(arguments)}) and the options {sorted(options)}: "
            f"{error}; expected {expected}"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass


def _place_of(error: BaseException, module_name: str) -> str:
    """The file of a module that cannot be imported, with the faulty line if that is in the file."""
    file = _file_of(module_name)
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def _file_of(module_name: str) -> str:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    return spec.origin if spec is not None and spec.origin else module_name


@contextmanager
def not_loading(*packages: str) -> Iterator[None]:
    """Within this context, the import system takes `packages` for absent, unless they are loaded already."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is its own sign for that
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
