"""Data-Juicer's operators (the extra `data-juicer`) on texts: on tasks before a run, on answers during one.

Operators are applied here, in this process, to texts alone: no data set of theirs, no executor, no pool. A missing
package is never installed while a run is under way, which Data-Juicer does if one lets it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.names import nearest

INSTALL = "pip install 'leeway[data-juicer]'"
KINDS = ("Filter", "Mapper", "Deduplicator", "Selector")
"""What can be applied to the texts of tasks. Groupers and aggregators make other rows of several."""
_TEXT, _ROW = "text", "__row__"


class DataJuicer:
    """Operators in sequence. `process`: as in Data-Juicer's own configs, a list of {name: {option: value}}.

    Raises ValueError in one line, naming `key`, for operators that are not there, are not of `kinds`, or have no such
    option, and where the library is not installed.
    """

    def __init__(self, process: Sequence[Any], *, key: str, kinds: Sequence[str] = KINDS) -> None:
        self._operators = [
            (name, kind, _made(name, options, key)) for name, kind, options in checked(process, key, kinds)
        ]
        self._fields = importlib.import_module("data_juicer.utils.constant").Fields

    def kept(self, texts: Sequence[str]) -> list[bool]:
        """Which of them pass all filters. `kinds` were filters alone."""
        samples = self._samples(texts)
        left = list(range(len(texts)))
        for _, _, operator in self._operators:
            keeps = self._filtered(operator, samples)
            left = [at for at, keep in zip(left, keeps, strict=True) if keep]
            samples = {name: [v for v, keep in zip(own, keeps, strict=True) if keep] for name, own in samples.items()}
        return [at in set(left) for at in range(len(texts))]

    def applied(self, texts: Sequence[str]) -> list[tuple[int, str]]:
        """(the place in `texts`, the text now) of those that are left, in the order that the operators leave them in.

        Raises ValueError in one line for an operator that makes several texts of one.
        """
        samples = self._samples(texts)
        for name, kind, operator in self._operators:
            if not samples[_ROW]:
                break
            if kind == "Filter":
                keeps = self._filtered(operator, samples)
                samples = {
                    field: [v for v, keep in zip(own, keeps, strict=True) if keep] for field, own in samples.items()
                }
            elif kind == "Mapper":
                samples = _lists(operator.process_batched(samples))
            else:
                samples = _of_data_set(operator, kind, samples)
            if len(set(samples[_ROW])) < len(samples[_ROW]):
                raise ValueError(
                    f"{name}: makes several texts of one, expected one of each task; cut them up before, into a file"
                )
        return list(zip(samples[_ROW], samples[_TEXT], strict=True))

    def _samples(self, texts: Sequence[str]) -> dict[str, list[Any]]:
        return {
            _TEXT: list(texts),
            _ROW: list(range(len(texts))),
            self._fields.stats: [{} for _ in texts],
            self._fields.meta: [{} for _ in texts],
        }

    def _filtered(self, operator: Any, samples: dict[str, list[Any]]) -> list[bool]:
        samples.update(operator.compute_stats_batched(samples))
        return [bool(keep) for keep in operator.process_batched(samples)]


def checked(process: Sequence[Any], key: str, kinds: Sequence[str] = KINDS) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, kind, options) of each operator. No operator is built: some load models. Raises as `DataJuicer` does."""
    if not isinstance(process, list) or not process:
        raise ValueError(f"{key}: got {process!r}, expected operators, as [{{text_length_filter: {{min_len: 10}}}}]")
    known = _library(key)
    found = []
    for step in process:
        if not isinstance(step, str) and not (isinstance(step, Mapping) and len(step) == 1):
            raise ValueError(f"{key}: got {step!r:.100}, expected one operator per list item, {{name: options}}")
        name, options = (step, None) if isinstance(step, str) else next(iter(step.items()))
        kind = known.get(name)
        if kind is None:
            guess = nearest(str(name), known)
            raise ValueError(
                f"{key}: Data-Juicer has no operator {name!r:.60}" + (f"; did you mean {guess}?" if guess else "")
            )
        found.append((name, _kind(kind, name, key, kinds), _options(kind, name, options, key)))
    return found


def _kind(operator: type, name: str, key: str, kinds: Sequence[str]) -> str:
    kind = next((base.__name__ for base in operator.__mro__ if base.__module__.endswith("ops.base_op")), "")
    if kind in kinds:
        return kind
    why = "the tokens that are trained on are those that the policy wrote: a text cannot be changed afterwards"
    reason = f", because {why}" if kind == "Mapper" else ""
    raise ValueError(f"{key}: {name} is a {kind}, expected a {' or '.join(kinds)}{reason}")


def _options(operator: Any, name: str, options: Any, key: str) -> dict[str, Any]:
    """Data-Juicer itself passes over options that an operator does not have."""
    own = options or {}
    known: set[str] = set()
    for base in operator.__mro__:
        known |= getattr(base, "_BASE_PARAMS", {}).keys()
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            known |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known.discard("self")
    if not isinstance(own, Mapping):
        raise ValueError(f"{key}: {name}: got {own!r:.60}, expected its options as a mapping")
    if unknown := sorted(str(option) for option in own if option not in known):
        guess = nearest(unknown[0], known)
        raise ValueError(f"{key}: {name} has no option {unknown[0]}" + (f"; did you mean {guess}?" if guess else ""))
    if own.get("text_key", _TEXT) != _TEXT:
        raise ValueError(f"{key}: {name}.text_key: got {own['text_key']!r:.60}, expected none: there is one text")
    return dict(own)


def _made(name: str, options: dict[str, Any], key: str) -> Any:
    try:
        return _library(key)[name](**options)
    except Exception as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{key}: {name} cannot be made: {cause}") from error


def _library(key: str) -> Mapping[str, Any]:
    """Operators by name."""
    try:
        loguru = importlib.import_module("loguru")
        loguru.logger.disable("data_juicer")
        loader = importlib.import_module("data_juicer.utils.lazy_loader").LazyLoader
        loader._install_package = classmethod(_refuse_to_install)
        return importlib.import_module("data_juicer.ops").OPERATORS.modules
    except ImportError as error:
        raise ValueError(f"{key}: Data-Juicer cannot be imported ({error}); install it: {INSTALL}") from None


def _refuse_to_install(cls: type, package: str, pip_args: Any = None) -> None:
    raise ImportError(f"it needs the package {package}, which is not installed; install it beforehand")


def _of_data_set(operator: Any, kind: str, samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Duplicates are found, and rows selected, in a data set as a whole."""
    data_set = importlib.import_module("datasets").Dataset
    rows = [{_TEXT: text, _ROW: row} for text, row in zip(samples[_TEXT], samples[_ROW], strict=True)]
    if kind == "Deduplicator":
        found, _ = operator.process(data_set.from_list([operator.compute_hash(row) for row in rows]))
    else:
        found = operator.process(data_set.from_list(rows))
    left = found[_ROW][:]
    at = {row: place for place, row in enumerate(samples[_ROW])}
    return {name: [own[at[row]] for row in left] for name, own in samples.items()}


def _lists(samples: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: list(values) for name, values in samples.items()}
