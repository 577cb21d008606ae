"""Write docs/compatibility.md from what tests did.

    python -m pytest --junitxml build/tests.xml ...
    python -m scripts.make_compatibility build/tests.xml [more.xml ...]

A cell names how many of its tests passed. Tests that were not part of any given run leave "not run". A cell with a
failure says so and makes the exit status 1. The largest gap of each sampling setting is a property that its test
recorded: "gap, ENGINE, SETTING".
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trl_support_replay.libraries.environment import EnvironmentReport, report

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"


@dataclass(frozen=True)
class Matrix:
    """A table whose cells are sets of tests.

    Attributes:
        title: heading.
        corner: heading of the first column.
        columns: headings of the others.
        rows: name to one tuple of patterns a column; a pattern is matched against `path::test[parameters]`. An empty
            tuple is a combination that does not exist.
    """

    title: str
    corner: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[tuple[str, ...], ...]]


_TRAINER, _SERVING, _ROUTING = "tests/trainers/", "tests/server/", "tests/routing/"
_SCORING, _MEGATRON = "tests/scoring/", "tests/megatron/"
MATRICES = (
    Matrix(
        "Engines",
        "sampling with",
        ("supports", "tools, several turns", "routed experts"),
        {
            "transformers `generate`": (
                (f"{_TRAINER}test_replay.py::test_transformers_*", "tests/engines/test_transformers_generate.py::*"),
                (f"{_TRAINER}test_multi_turn.py::test_custom_rollout*",),
                (f"{_TRAINER}test_routes.py::*",),
            ),
            "transformers continuous batching": (
                ("tests/engines/test_settings_replayed.py::test_continuous_batching*",),
                (),
                (),
            ),
            "vLLM in the training process, supports from its worker": (
                (f"{_TRAINER}test_replay.py::test_vllm_*", "tests/engines/test_vllm_captures.py::*"),
                (f"{_TRAINER}test_multi_turn.py::test_tool_loop*", f"{_TRAINER}test_multi_turn.py::test_environment*"),
                (f"{_TRAINER}test_routes_vllm.py::*", f"{_ROUTING}test_vllm.py::*"),
            ),
            "vLLM's sampling mask (its output only: the engine needs a GPU)": (
                ("tests/engine_outputs/test_vllm_outputs.py::test_sampling_mask*",),
                (),
                (),
            ),
            "vLLM server, packed wire": (
                (f"{_SERVING}test_training.py::test_training_follows*", f"{_SERVING}test_real_server.py::*logprobs*"),
                (f"{_SERVING}test_real_server.py::test_twenty_turns*",),
                (f"{_SERVING}test_training.py::*routes*", f"{_SERVING}test_real_server.py::test_routes*"),
            ),
            "SGLang (a local server that speaks its protocol)": (
                ("tests/engines/test_sglang_server.py::*",),
                (),
                (),
            ),
            "saved traces": (
                (f"{_TRAINER}test_saved_traces.py::test_training_on_saved*",),
                (f"{_TRAINER}test_saved_traces.py::test_several_batches*",),
                (f"{_TRAINER}test_saved_traces.py::test_routes*",),
            ),
        },
    ),
    Matrix(
        "Sharding",
        "two or more CPU processes",
        ("scoring", "training", "routed experts"),
        {
            "DDP": ((), (f"{_TRAINER}test_sharding.py::test_ddp*",), ()),
            "ZeRO-2": (
                (),
                (f"{_TRAINER}test_sharding.py::test_zero2*", "tests/recipes/test_accelerate.py::*zero2*"),
                (),
            ),
            "ZeRO-3": (
                (f"{_SCORING}test_sharding.py::*zero3*",),
                (f"{_TRAINER}test_sharding.py::test_zero3*",),
                (f"{_ROUTING}test_sharding.py::*zero3*",),
            ),
            "FSDP2 (Accelerate has none on a CPU, so its parts by themselves)": (
                (f"{_SCORING}test_sharding.py::*fsdp2*",),
                (),
                (f"{_ROUTING}test_sharding.py::*fsdp2*",),
            ),
            "FSDP1": ((f"{_SCORING}test_sharding.py::*fsdp1*",), (), ()),
            "tensor parallel": (
                (f"{_SCORING}test_tensor_parallel.py::*", f"{_SCORING}test_sharding.py::*-tp-*"),
                (f"{_TRAINER}test_sharding.py::test_tensor_parallel*",),
                (),
            ),
            "Megatron-Core": (
                (f"{_MEGATRON}test_scorer.py::*",),
                (f"{_MEGATRON}test_recipe.py::*",),
                tuple(f"{_MEGATRON}test_{part}.py::*" for part in ("replay", "refusals", "parity")),
            ),
        },
    ),
    Matrix(
        "Around it",
        "",
        ("",),
        {
            "stock GRPO, when nothing is truncated": ((f"{_TRAINER}test_stock_equality.py::*",),),
            "RLOO": ((f"{_TRAINER}test_rloo.py::*",),),
            "every score that a loss may take": ((f"{_TRAINER}test_scores.py::*",),),
            "audit": (("tests/analysis/test_causes.py::*", "tests/analysis/test_page.py::*"),),
            "evaluation, checkpoints, completions": ((f"{_TRAINER}test_lifecycle.py::*",),),
            "LoRA, with adapter reference": ((f"{_TRAINER}test_replay.py::*LoRA*",),),
            "heads of the families of transformers": ((f"{_SCORING}test_head_from_model.py::*",),),
            "families of mixtures of experts": ((f"{_ROUTING}test_families.py::*",),),
            "trackio, wandb, tensorboard": ((f"{_TRAINER}test_trackers.py::*",),),
            "Hub (a local server that speaks its protocol)": (("tests/hub/test_publish.py::*",),),
            "core dependencies alone": (("tests/packaging/test_distributions.py::*",),),
            "recipes, planned": (("tests/recipes/test_dry_run.py::*",),),
        },
    ),
)


def read_results(paths: Iterable[Path]) -> dict[str, str]:
    """Outcome of each test, by `path::name`: "passed", "failed" or "skipped". Later files win."""
    found = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            module, name = case.get("classname", "").replace(".", "/") + ".py", case.get("name", "")
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found[f"{module}::{name}"] = outcome
    return found


def read_gaps(paths: Iterable[Path]) -> dict[str, dict[str, str]]:
    """The largest gap of each sampling setting, in nats, by engine. Later files win."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            for recorded in case.iter("property"):
                kind, engine, setting = f"{recorded.get('name')}, , ".split(", ", 2)
                if kind == "gap":
                    found.setdefault(engine, {})[setting.removesuffix(", , ")] = recorded.get("value", "")
    return found


def cell(patterns: tuple[str, ...], results: Mapping[str, str]) -> str:
    """What is said of a set of tests."""
    if not patterns:
        return "-"
    outcomes = [o for name, o in results.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    failed, passed = outcomes.count("failed"), outcomes.count("passed")
    if failed:
        return f"**{failed} of {failed + passed} fail**"
    return f"{passed} pass" if passed else "not run"


def page(
    results: Mapping[str, str], environment: EnvironmentReport, gaps: Mapping[str, Mapping[str, str]] | None = None
) -> str:
    """The page, in Markdown."""
    lines = [
        "# Compatibility",
        "",
        "Written by `make compatibility` from the results of tests: a cell says how many tests of that combination",
        "pass. All of them run on CPUs, with the real libraries but where a line says otherwise. *Not run* means that",
        "the last run of the tests did not include them.",
        "",
        "## Versions",
        "",
        "| package | supported | tested |",
        "|---|---|---|",
        *(
            f"| {p.name} | `{p.supported}` | {f'{p.version} ({p.distribution})' if p.version else '-'} |"
            for p in environment.packages
        ),
        "",
    ]
    for matrix in MATRICES:
        lines += [f"## {matrix.title}", "", f"| {matrix.corner} | {' | '.join(matrix.columns)} |"]
        lines += ["|---" * (len(matrix.columns) + 1) + "|"]
        for name, cells in matrix.rows.items():
            lines.append(f"| {name} | {' | '.join(cell(patterns, results) for patterns in cells)} |")
        lines.append("")
    lines += [
        "## Settings",
        "",
        "The largest difference between replayed and recorded log-probs, in nats per token.",
        "",
    ]
    for engine, found in sorted((gaps or {}).items()):
        lines += [f"| {engine} | largest gap |", "|---|---|"]
        lines += [f"| {setting} | {gap} |" for setting, gap in found.items()] + [""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JUnit XML files that pytest wrote")
    parser.add_argument("--output", type=Path, default=PAGE)
    options = parser.parse_args()
    text = page(read_results(options.results), report(), read_gaps(options.results))
    options.output.write_text(text)
    return 1 if " fail**" in text else 0


if __name__ == "__main__":
    sys.exit(main())
