"""The command in a shell script: read like a shell would, run never.

What is understood: assignments, arrays, quotes, `$NAME`, `${NAME}`, `${NAME:-default}`, `$((a * b))`, comments, and
lines that go on. Of branches and loops every line is read once, from top to bottom. A variable that the script does
not set comes from the environment, and stays a reference to it; what a command would print is not known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_WORDS = 20_000
MAX_WORD = 20_000
_ASSIGNMENT = re.compile(r"(?:(?:export|declare(?: -\w+)*|local|readonly)\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_BRANCHES = {"if", "elif", "else", "for", "while", "case", "until"}


@dataclass
class Script:
    """What the script says: `commands`, each a list of words, and whether some of it depends on a condition."""

    commands: list[list[str]] = field(default_factory=list)
    branches: bool = False


def read_script(text: str) -> Script:
    """Never raises: what is not understood is left as it stands."""
    script, variables = Script(), dict[str, list[str]]()
    for line in _lines(text):
        words = line.split(None, 1)
        if words and words[0] in _BRANCHES:
            script.branches = True
        match = _ASSIGNMENT.fullmatch(line)
        if match and _is_one_word(match[3]):
            name, more, raw = match[1], match[2], match[3].strip()
            inner = raw[1:-1] if raw.startswith("(") and raw.endswith(")") else raw
            values = list(_words(inner, variables))
            variables[name] = [*(variables.get(name, []) if more else []), *(values or [""])][:MAX_WORDS]
            continue
        command = list(_words(line, variables))
        if command:
            script.commands.append(command)
    return script


def _lines(text: str) -> Iterator[str]:
    """Whole commands: lines that go on are joined, comments are gone, quotes and parentheses are closed."""
    line, quote, depth = "", "", 0
    joined, i = text.replace("\r\n", "\n"), 0
    while i < len(joined):
        char = joined[i]
        if char == "\\" and joined[i + 1 : i + 2] == "\n":
            line += " "
            i += 2
            continue
        if quote:
            if char == "\\" and quote == '"':
                line += joined[i : i + 2]
                i += 2
                continue
            quote = "" if char == quote else quote
        elif char == "\\":
            line += joined[i : i + 2]
            i += 2
            continue
        elif char in "'\"":
            quote = char
        elif char == "#" and (not line or line[-1].isspace()):
            while i < len(joined) and joined[i] != "\n":
                i += 1
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth = max(0, depth - 1)
        elif char in "\n;" and not depth:
            if line.strip():
                yield line.strip()
            line = ""
            i += 1
            continue
        line += char
        i += 1
    if line.strip():
        yield line.strip()


def _is_one_word(raw: str) -> bool:
    """Whether what follows `NAME=` is its whole value, and not a command in whose environment NAME is."""
    raw, i = raw.strip(), 0
    if raw.startswith("("):
        return True
    while i < len(raw):
        if raw[i].isspace():
            return False
        if raw[i] == "'":
            i = (raw.find("'", i + 1) + 1) or len(raw)
        elif raw[i] == '"':
            i = _end_of_quotes(raw, i + 1) + 1
        elif raw[i : i + 2] in ("$(", "${"):
            i = _closing(raw, i + 1, "()" if raw[i + 1] == "(" else "{}") + 1
        else:
            i += 1
    return True


def _words(line: str, variables: dict[str, list[str]]) -> Iterator[str]:
    """The words of a command, quotes removed and variables replaced."""
    word, started, i, count = "", False, 0, 0
    while i <= len(line):
        char = line[i] if i < len(line) else " "
        if char.isspace():
            if started and count < MAX_WORDS:
                count += 1
                yield word
            word, started = "", False
            i += 1
        elif char == "'":
            end = line.find("'", i + 1)
            end = len(line) if end < 0 else end
            word, started = word + line[i + 1 : end], True
            i = end + 1
        elif char == '"':
            end = _end_of_quotes(line, i + 1)
            inner = line[i + 1 : end]
            array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", inner)
            if array and not word:
                yield from variables.get(array[1], [])
                started = False
            else:
                word, started = (word + _expanded(inner, variables))[:MAX_WORD], True
            i = end + 1
        elif char == "\\":
            word, started = word + line[i + 1 : i + 2], True
            i += 2
        elif char == "$":
            array = re.match(r"\$\{(\w+)\[[@*]\]\}", line[i:])
            if array and not word:
                yield from variables.get(array[1], [])
                i += len(array[0])
                continue
            text, i = _variable(line, i, variables)
            if not word and len(text.split()) > 1:
                yield from text.split()
                continue
            word, started = (word + text)[:MAX_WORD], started or bool(text)
        else:
            word, started = word + char, True
            i += 1


def _end_of_quotes(line: str, start: int) -> int:
    """The index of the quote that closes, skipping those inside `${...}`, `$(...)` and after a backslash."""
    i, depth = start, 0
    while i < len(line):
        if line[i] == "\\":
            i += 2
            continue
        if line[i : i + 2] in ("${", "$("):
            depth += 1
            i += 2
            continue
        if line[i] in "})" and depth:
            depth -= 1
        elif line[i] == '"' and not depth:
            return i
        i += 1
    return len(line)


def _expanded(text: str, variables: dict[str, list[str]]) -> str:
    """The inside of double quotes."""
    out, i = "", 0
    while i < len(text) and len(out) <= MAX_WORD:
        if text[i] == "\\" and text[i + 1 : i + 2] in ('"', "\\", "$", "`"):
            out += text[i + 1]
            i += 2
        elif text[i] == "$":
            found, i = _variable(text, i, variables)
            out += found
        else:
            out += text[i]
            i += 1
    return out


def _variable(text: str, i: int, variables: dict[str, list[str]]) -> tuple[str, int]:
    """What stands for the `$...` at `i`, and where the text goes on."""
    if text[i : i + 3] == "$((":
        end = _closing(text, i + 1, "()")
        if text[end - 1 : end + 1] == "))":
            return _arithmetic(text[i + 3 : end - 1], variables), end + 1
    if text[i : i + 2] == "$(":
        end = _closing(text, i + 1, "()")
        return text[i : end + 1].replace("$", ""), end + 1
    if text[i : i + 2] == "${":
        end = _closing(text, i + 1, "{}")
        inner = text[i + 2 : end]
        match = re.fullmatch(r"(\w+)(\[[@*]\])?(?::?[-=](.*))?", inner, re.DOTALL)
        if match is None:
            return f"${{{inner}}}" if "." in inner or ":" in inner else "", end + 1  # Hydra's own references
        name, default = match[1], match[3]
        if name in variables:
            return " ".join(variables[name]), end + 1
        if default is not None:
            return _expanded(default.replace('"', "").replace("'", ""), variables), end + 1
        return _from_environment(name), end + 1
    match = re.match(r"\$([A-Za-z_]\w*|[0-9@*#?$!])", text[i:])
    if match is None:
        return "$", i + 1
    name = match[1]
    if name in variables:
        return " ".join(variables[name]), i + len(match[0])
    return _from_environment(name), i + len(match[0])


def _from_environment(name: str) -> str:
    """Arguments of the script are left out: there are none."""
    return f"${{oc.env:{name}}}" if name[0].isalpha() or name[0] == "_" else ""


def _closing(text: str, start: int, pair: str) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    return len(text)


def _arithmetic(text: str, variables: dict[str, list[str]]) -> str:
    """Whole numbers, + - * / and parentheses; what is not that is left as it stands."""

    def put(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = " ".join(variables.get(name, [])).strip()
        return f"({value})" if re.fullmatch(r"\d{1,18}", value) else name

    expression = re.sub(r"\$\{(\w+)\}|\$?\b([A-Za-z_]\w*)\b", put, text).replace("/", "//")
    if len(expression) > 500 or not re.fullmatch(r"[\d\s()+*/\-]+", expression):
        return f"(({text.strip()}))"
    try:
        return str(_value_of(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return f"(({text.strip()}))"


def _value_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_value_of(node.left), _value_of(node.right))
        if abs(value) > 10**18:
            raise ValueError("too large")
        return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value_of(node.operand)
    raise ValueError("not arithmetic")
