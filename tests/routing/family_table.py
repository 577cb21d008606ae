"""The table of families in the documentation, from tiny models that are built and checked one by one.

python -m tests.routing.family_table > docs/routing_families.md
"""

from __future__ import annotations

import torch
import transformers

from tests.routing.moe_checks import check_family
from tests.routing.moe_families import FAMILIES, REFUSED, build
from trl_support_replay.routing import RouterReplay, UnreplayableRouterError

_HEAD = """# Families of mixture-of-experts models

Every line was written by a check that builds a tiny model of the family with transformers {version} and trains it for
single steps on a CPU (`python -m tests.routing.family_table`; its parts are tests).

- *Exact*: with the model's own routes recorded and replayed, logits and all gradients are equal bit for bit, in float32
  and in bfloat16. With other routes, both change, and the router's weights still get a gradient.
- *Checkpointing*: with gradient checkpointing (re-entrant, not re-entrant) the gradients under replayed routes equal
  those without it, bit for bit.
- *Experts*: the implementations of the experts (`experts_implementation`) under which the above holds. Families whose
  experts have only one are marked "own".

## Replayed

| `model_type` | router | exact | checkpointing | experts |
| --- | --- | --- | --- | --- |
"""


def replayed_row(model_type: str) -> str:
    """One line of the first table; raises when any check fails."""
    can_choose = build(model_type)._can_set_experts_implementation()
    implementations = ["eager", "batched_mm", "grouped_mm"] if can_choose else ["eager"]
    router = ""
    for experts in implementations:
        for dtype in (torch.float32, torch.bfloat16):
            report = check_family(model_type, dtype=dtype, experts=experts)
            if report.failures():
                raise AssertionError(f"{model_type}, {experts}, {dtype}: {report.failures()}")
            router = report.router
    experts = ", ".join(implementations) if can_choose else "own"
    return f"| `{model_type}` | {router} | float32, bfloat16 | both | {experts} |"


def refused_row(model_type: str) -> str:
    """One line of the second table; raises when the family is not refused."""
    try:
        RouterReplay(build(model_type))
    except UnreplayableRouterError as error:
        return f"| `{model_type}` | {str(error).partition('cannot be replayed: ')[2].rstrip('.')} |"
    raise AssertionError(f"{model_type} was not refused")


def table() -> str:
    """The whole page."""
    lines = [replayed_row(model_type) for model_type in FAMILIES]
    refused = [refused_row(model_type) for model_type in REFUSED]
    head = _HEAD.format(version=transformers.__version__)
    return (
        f"{head}{chr(10).join(lines)}\n\n## Refused\n\nBuilding a `RouterReplay` raises `UnreplayableRouterError` with "
        f"this reason.\n\n| `model_type` | why |\n| --- | --- |\n{chr(10).join(refused)}\n\n"
        "`nllb_moe` and `switch_transformers`, which are no causal language models, are refused\n"
        "[as well](refused.md#families-of-mixture-of-experts-models).\n\n"
        "A family in neither table is looked at when a `RouterReplay` is built: its routers are found by a forward of\n"
        "a few tokens, and it is refused unless each layer with experts makes one top-k over them.\n"
    )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(table(), end="")
