"""Finds GRPO and RLOO settings in Python scripts, YAML files and command lines; nothing is run."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

# TRL's classes, and those that take their place.
_OURS = {f"{name}{kind}": f"SupportReplay{name}{kind}" for name in ("GRPO", "RLOO") for kind in ("Config", "Trainer")}
_CONFIGS = tuple(name for pair in _OURS.items() for name in pair if name.endswith("Config"))
_COMMANDS = ("trl", "trl-support-replay")


class SourceError(ValueError):
    """A file that cannot be read, or holds no such settings."""


@dataclass(frozen=True)
class FoundSettings:
    """The settings of one configuration.

    Attributes:
        where: file and line.
        values: those whose value is written down.
        unknown: name to source text of those that only a run would tell.
        algorithm: "GRPO" or "RLOO".
        imports: lines that import TRL's classes, as `(line number, text)`.
        moved: whether it is a configuration, or a command line, of this package already.
    """

    where: str
    values: dict[str, Any]
    unknown: dict[str, str] = field(default_factory=dict)
    algorithm: str = "GRPO"
    imports: tuple[tuple[int, str], ...] = ()
    moved: bool = False


def read_settings(path: Path) -> list[FoundSettings]:
    """Every GRPO or RLOO configuration in a file.

    Args:
        path: a Python script, a YAML file for `trl grpo --config`, or a shell script that calls `trl grpo`.

    Raises:
        SourceError: another kind of file, one that does not parse, or one without such settings.
    """
    text = _text(path)
    if path.suffix == ".py":
        found = _from_python(text, path.name)
    elif path.suffix in (".yaml", ".yml"):
        found = [_from_yaml(text, path)]
    elif path.suffix == ".sh":
        found = list(_from_shell(text, path))
    else:
        raise SourceError(f"{path} is neither Python (.py), YAML (.yaml, .yml) nor a shell script (.sh).")
    if not found:
        what = "makes no GRPOConfig or RLOOConfig" if path.suffix == ".py" else "calls no `trl grpo`"
        raise SourceError(f"{path} {what}.")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} cannot be read: {error}.") from error


def replaced_import(text: str) -> str:
    """The import to write in the place of one of TRL's: ours under the same names, what else it names left to TRL.

    Args:
        text: one `from ... import ...` statement.
    """
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ImportFrom)
    parts = [f"{_OURS[name.name]} as {name.asname or name.name}" for name in node.names if name.name in _OURS]
    rest = [ast.unparse(name) for name in node.names if name.name not in _OURS]
    kept = [f"from {node.module} import {', '.join(rest)}"] if rest else []
    return "; ".join([*kept, f"from trl_support_replay import {', '.join(parts)}"])


def _from_yaml(text: str, path: Path) -> FoundSettings:
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # the latter of a day that no month has
        raise SourceError(f"{path} is not YAML: {error}.") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise SourceError(f"{path} holds no settings: a mapping of names to values is needed.")
    return FoundSettings(path.name, {name: _parsed(value) for name, value in values.items()})


def _from_shell(text: str, path: Path) -> Iterator[FoundSettings]:
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        if not re.search(r"\bgrpo\b", line):
            continue  # whatever it is, quotes over several lines among it
        try:
            words = _words(line)
        except ValueError as error:
            raise SourceError(f"{path}: {line.strip()!r} does not parse: {error}.") from error
        at = next((i for i, word in enumerate(words) if word.rsplit("/", 1)[-1] in _COMMANDS), None)
        if at is not None and words[at + 1 : at + 2] == ["grpo"]:
            found = _from_arguments(words[at + 2 :], path)
            yield replace(found, moved=words[at].endswith(_COMMANDS[1]))


def _words(line: str) -> list[str]:
    """The words of a line up to the first `grpo` command's end: a redirection, a pipe or another command.

    Raises:
        ValueError: an open quotation.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if not set(word) <= set("();<>|&"):
            words.append(word)
        elif "grpo" in words:
            redirected = word[0] in "<>" and words[-1] in ("0", "1", "2")
            return words[:-1] if redirected else words
        else:
            words = []  # of another command
    return words


def _from_arguments(words: list[str], path: Path) -> FoundSettings:
    values: dict[str, Any] = {}
    name: str | None = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].replace("-", "_").partition("=")
            values[name] = _parsed(word.partition("=")[2]) if value else True
        elif name is not None:
            values[name] = _parsed(word) if values[name] is True else f"{values[name]} {word}"
    if isinstance(config := values.pop("config", None), str):
        # Beside the script, or where it is run from.
        place = next((p for p in (path.parent / config, Path(config)) if p.is_file()), None)
        if place is None:
            raise SourceError(f"{path}: --config {config} is neither beside the script nor in the current folder.")
        values = _from_yaml(_text(place), place).values | values
    unknown = {k: v for k, v in values.items() if isinstance(v, str) and "$" in v}
    return FoundSettings(path.name, {k: v for k, v in values.items() if k not in unknown}, unknown)


def _parsed(value: Any) -> Any:
    """A value as the command line's parser takes it: numbers, truth values and JSON mappings written as text."""
    if not isinstance(value, str):
        return value
    if value.strip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    for kind in (int, float):  # YAML takes 1e-2 for text
        with contextlib.suppress(ValueError):
            return kind(value)
    return {"true": True, "yes": True, "false": False, "no": False}.get(value.lower(), value)


def _from_python(text: str, name: str) -> list[FoundSettings]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SourceError(f"{name} is not Python: {error}.") from error
    aliases = {n: n for n in _CONFIGS}
    imports = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if any(part.name in _OURS for part in node.names):
                imports.append((node.lineno, ast.unparse(node)))
            aliases |= {part.asname: part.name for part in node.names if part.asname and part.name in _CONFIGS}
    names = _literal_names(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node.func) in aliases:
            values, unknown = _keywords(node, names)
            config = aliases[_called(node.func)]
            algorithm, moved = "RLOO" if "RLOO" in config else "GRPO", config in _OURS.values()
            found.append(FoundSettings(f"{name}:{node.lineno}", values, unknown, algorithm, tuple(imports), moved))
    return found


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _literal_names(tree: ast.Module) -> dict[str, Any]:
    """Names that are assigned once, to a literal."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            assigned.setdefault(node.target.id, []).append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            assigned.setdefault(node.target.id, []).extend([node.value, node.value])
    known: dict[str, Any] = {}
    for name, expressions in assigned.items():
        if len(expressions) == 1:
            try:
                known[name] = _literal(expressions[0], {})
            except (ValueError, TypeError):
                continue
    return known


def _keywords(call: ast.Call, names: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    unknown: dict[str, str] = {}
    for keyword in call.keywords:
        try:
            value = _literal(keyword.value, names)
        except (ValueError, TypeError):  # the latter of a key that cannot be one
            unknown[keyword.arg or "**"] = ast.unparse(keyword.value)
            continue
        if keyword.arg is not None:
            values[keyword.arg] = value
        elif isinstance(value, dict):
            values |= {str(name): item for name, item in value.items()}
    return values, unknown


def _items(node: ast.Dict) -> Iterator[tuple[ast.expr, ast.expr]]:
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise ValueError("another mapping is merged in")
        yield key, value


def _literal(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression made of literals, known names, lists and mappings.

    Raises:
        ValueError: it is made of something else.
    """
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Dict):
        return {_literal(key, names): _literal(value, names) for key, value in _items(node)}
    if isinstance(node, ast.List | ast.Tuple):
        items = [_literal(item, names) for item in node.elts]
        return tuple(items) if isinstance(node, ast.Tuple) else items
    if isinstance(node, ast.Call) and _called(node.func) == "dict" and not node.args:
        return {k.arg: _literal(k.value, names) for k in node.keywords}
    return ast.literal_eval(node)
