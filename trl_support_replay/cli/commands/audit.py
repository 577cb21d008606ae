"""Say where the gap between training and rollout comes from, for saved traces.

Splits the gap of every recorded token into truncation, routes, stale weights and the rest, and tries what is left
against known faults: records shifted by one, another temperature, wrong routes, half precision, other weights. Writes
audit.json and audit.html (one page, no network). Exits with 1 when a fault is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._arguments import ScoringOptions, above_zero, option, positive, read_options

_EXAMPLE = """\
trl-support-replay audit runs/traces --model runs/checkpoint-100 \\
    --sampler Qwen/Qwen3-0.6B --output runs/audit"""


@dataclass(kw_only=True)
class Options(ScoringOptions):
    model: str = option("model whose training is looked at: a folder or a Hub name")
    revision: str | None = option("revision of --model", None)
    sampler: str | None = option("model with the weights that sampled, to tell stale weights from the rest", None)
    sampler_revision: str | None = option("revision of --sampler; alone: of --model", None)
    output: str = option("folder for audit.json and audit.html")
    step: int | None = option("only traces of this training step (or, without a step, shard)", None, int)
    limit: int = option("how many traces, evenly spaced", 256, positive)
    samples: int = option("most samples in the token view", 64, positive)
    page_mb: float = option("size of the report, at most", 1.8, above_zero)
    tolerance: float = option(
        "largest gap in nats that is rounding; the mean gap may be a twentieth of it", 1e-3, above_zero
    )


def main(argv: Sequence[str]) -> int:
    """Write the report and print its table; 1 when there is a fault."""
    args = read_options(Options, argv, "audit", __doc__, _EXAMPLE)

    import json

    from rich.console import Console
    from rich.progress import track

    from ...analysis.audit import audit_traces, load_traces
    from ...analysis.audit.page import render_page
    from ...analysis.audit.report import build_report
    from ...analysis.audit.table import print_report
    from ...analysis.audit.token_scores import routes_for
    from ...analysis.audit.token_view import add_samples
    from ...analysis.models import check_fits, load_model
    from ...routing import has_experts
    from ...traces.shards import ShardFolder, write_file

    output = ShardFolder(args.output, "--output").path
    source = load_traces(args.traces, args.limit, args.step)
    sampler_name = args.sampler or (args.model if args.sampler_revision else None)
    models = []
    for given, name, revision in (
        ("--model", args.model, args.revision),
        ("--sampler", sampler_name, args.sampler_revision),
    ):
        if name is not None:
            loaded, config = load_model(given, name, dtype=args.dtype, device=args.device, revision=revision)
            check_fits(source.traces, loaded, config, given)
            models.append(loaded)
    model, sampler = models[0], models[-1] if sampler_name else None
    if has_experts(model):
        print(f"--model {routes_for(source.traces, model)[1]}.")
    texts = _texts(args.model, args.revision)
    audit = audit_traces(
        source,
        model,
        sampler,
        batch_size=args.batch_size,
        tolerance=args.tolerance,
        track=lambda batches: track(batches, "scoring traces", console=Console(stderr=True), transient=True),
    )
    report = build_report(
        audit,
        model=_named(args.model, args.revision),
        sampler=_named(sampler_name, args.sampler_revision),
        eos_token_ids=_eos_token_ids(model),
    )
    add_samples(report, audit, texts, max_samples=args.samples, max_bytes=int(args.page_mb * 1e6))
    write_file(output / "audit.json", json.dumps(report, allow_nan=False).encode())
    write_file(output / "audit.html", render_page(report).encode())
    print_report(report, Console())
    print(f"report: {output / 'audit.html'}")
    return 1 if any(finding.is_fault for finding in audit.findings) else 0


def _named(name: str | None, revision: str | None) -> str | None:
    return name if name is None or revision is None else f"{name} at {revision}"


def _eos_token_ids(model: Any) -> list[int]:
    found = model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def _texts(name: str, revision: str | None) -> Callable[[int], str]:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, revision=revision or "main")
    except (OSError, ValueError) as error:
        print(f"--model {name} has no tokenizer, so the page shows ids: {str(error).splitlines()[0]}", file=sys.stderr)
        return lambda token_id: f"#{token_id}"
    # Padded rows of the head have no text.
    return lambda token_id: tokenizer.decode([token_id]) if token_id < len(tokenizer) else f"#{token_id}"
