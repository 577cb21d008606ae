"""Finds GRPO and RLOO settings in Python scripts and YAML files; nothing is run."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...errors import CommandError
from ...settings.config import SupportReplayGRPOConfig, SupportReplayRLOOConfig
from ..grpo_inputs import input_errors

# TRL's classes, and those that take their place.
_OURS = {f"{name}{kind}": f"SupportReplay{name}{kind}" for name in ("GRPO", "RLOO") for kind in ("Config", "Trainer")}
# Settings that decide whether tokens are truncated.
SAMPLING = {"top_k", "top_p", "min_p", "generation_kwargs", "use_vllm"}
_CONFIGS = [name for pair in _OURS.items() for name in pair if name.endswith("Config")]


@dataclass(frozen=True)
class FoundSettings:
    """The settings of one configuration.

    Attributes:
        where: file and line.
        args: every setting: as written, or else its default.
        unread: name to source text of the settings whose values only a run would tell.
        unknown: names that no configuration has.
        algorithm: "GRPO" or "RLOO".
        imports: lines that import TRL's classes, as `(line number, text)`.
        moved: whether it is a configuration of this package already.
    """

    where: str
    args: Any
    unread: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    algorithm: str = "GRPO"
    imports: tuple[tuple[int, str], ...] = ()
    moved: bool = False


def read_settings(path: Path) -> list[FoundSettings]:
    """Every GRPO or RLOO configuration in a file.

    Args:
        path: a Python script, or a YAML file for `trl grpo --config`.

    Raises:
        CommandError: another kind of file, one that does not parse, or one without such settings.
    """
    if path.suffix in (".yaml", ".yml"):
        from ..grpo_inputs.arguments import launch_options

        with input_errors(f"{path} is read as `trl-support-replay grpo --config {path}` would be."):
            return [FoundSettings(path.name, launch_options(["--config", str(path)]).arguments)]
    if path.suffix != ".py":
        raise CommandError(
            f"{path} is neither Python (.py) nor YAML (.yaml, .yml). To check a command line, run it as "
            "`trl-support-replay grpo ... --dry_run true`."
        )
    try:
        found = _from_python(ast.parse(path.read_text(encoding="utf-8")), path.name)
    except (OSError, SyntaxError, ValueError) as error:
        raise CommandError(f"{path} cannot be read as Python: {error}.") from error
    if not found:
        raise CommandError(f"{path} makes no GRPOConfig or RLOOConfig.")
    return found


def replaced_import(text: str) -> str:
    """The import that replaces one of TRL's: our classes under the same names, and the rest still from TRL.

    Args:
        text: one `from ... import ...` statement.
    """
    (node,) = ast.parse(text).body
    assert isinstance(node, ast.ImportFrom)
    parts = [f"{_OURS[name.name]} as {name.asname or name.name}" for name in node.names if name.name in _OURS]
    rest = [ast.unparse(name) for name in node.names if name.name not in _OURS]
    kept = [f"from {node.module} import {', '.join(rest)}"] if rest else []
    return "; ".join([*kept, f"from trl_support_replay import {', '.join(parts)}"])


def _from_python(tree: ast.Module, name: str) -> list[FoundSettings]:
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    aliases = {n: n for n in _CONFIGS}
    aliases |= {p.asname: p.name for node in imports for p in node.names if p.asname and p.name in _CONFIGS}
    lines = tuple((n.lineno, ast.unparse(n)) for n in imports if any(part.name in _OURS for part in n.names))
    literals = _Literals(nodes)
    found = []
    for call in nodes:
        if not isinstance(call, ast.Call) or (config := aliases.get(_called(call))) is None:
            continue
        values, unread = literals.keywords(call)
        algorithm = "RLOO" if "RLOO" in config else "GRPO"
        args = _defaults(SupportReplayRLOOConfig if algorithm == "RLOO" else SupportReplayGRPOConfig)
        names = vars(args).keys()
        unknown = tuple(n for n in values if n not in names)
        vars(args).update({n: value for n, value in values.items() if n in names})
        # An assignment to an attribute of any object: it may be this configuration.
        unread |= {
            ast.unparse(target): ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and target.attr in SAMPLING
        }
        moved = config in _OURS.values()
        found.append(FoundSettings(f"{name}:{call.lineno}", args, unread, unknown, algorithm, lines, moved))
    return found


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _defaults(config: type) -> SimpleNamespace:
    described: Any = config
    return SimpleNamespace(
        **{
            f.name: f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            for f in dataclasses.fields(described)
        }
    )


def _bound_name(node: ast.AST) -> str | None:
    """The name that is given a value here, by an assignment, a loop, a function's parameter or an import."""
    if isinstance(node, ast.Name):
        return None if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.alias):
        return node.asname or node.name
    return node.arg if isinstance(node, ast.arg) else None


class _Literals(ast.NodeTransformer):
    """Values that are written down: literals, names that a script gives one value only, and `dict(...)` of them."""

    def __init__(self, nodes: list[ast.AST]):
        self._known: dict[str, Any] = {}
        bound, known = Counter(map(_bound_name, nodes)), {}
        for node in nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and bound[target.id] == 1:
                        with contextlib.suppress(ValueError, TypeError):
                            known[target.id] = self.value(node.value)
        self._known = known

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._known[node.id]) if node.id in self._known else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _called(node) != "dict" or node.args:
            return node
        keys: list[ast.expr | None] = [ast.Constant(keyword.arg) if keyword.arg else None for keyword in node.keywords]
        return self.visit(ast.Dict(keys, [keyword.value for keyword in node.keywords]))

    def value(self, node: ast.expr) -> Any:
        """What an expression comes to.

        Raises:
            ValueError, TypeError: only a run would tell.
        """
        return ast.literal_eval(self.visit(ast.parse(ast.unparse(node), mode="eval").body))

    def keywords(self, call: ast.Call) -> tuple[dict[str, Any], dict[str, str]]:
        """Values of a call's keywords, and the source text of those that only a run would tell."""
        values: dict[str, Any] = {}
        unread: dict[str, str] = {}
        for keyword in call.keywords:
            try:
                value = self.value(keyword.value)
            except (ValueError, TypeError):
                unread[keyword.arg or "**"] = ast.unparse(keyword.value)
                continue
            values |= {keyword.arg: value} if keyword.arg else {str(name): item for name, item in dict(value).items()}
        return values, unread
