"""What is logged of supports and routes, reduced over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .routing import RouteMetrics
from .traces.columns import Trace

GatherRow = Callable[[list[float]], np.ndarray]
"""Gathers a list of `n` numbers from every process into `[processes, n]`."""


def support_metrics(samples: Sequence[Trace], repaired: int, num_synthetic: int, gather: GatherRow) -> dict[str, float]:
    """Sizes of the supports of one generation batch.

    Args:
        samples: this process's completions.
        repaired: how many of their supports were repaired, or lack or may lack members.
        num_synthetic: how many end in a token that nobody sampled.
        gather: over processes.
    """
    sizes = np.concatenate([sample.supports.sizes for sample in samples])
    sizes = sizes[sizes > 0]
    local = [sizes.sum(), len(sizes), (sizes == 1).sum(), repaired, num_synthetic, sizes.max(initial=0)]
    stats = gather([float(value) for value in local])
    total, count, singletons, all_repaired, synthetic = stats[:, :5].sum(axis=0).tolist()
    return {
        "support/size_mean": total / max(count, 1.0),
        "support/size_max": float(stats[:, 5].max()),
        "support/singleton_fraction": singletons / max(count, 1.0),
        "support/repaired": all_repaired,
        "support/synthetic_eos": synthetic,
    }


def route_metrics(found: RouteMetrics, gather: GatherRow) -> dict[str, float]:
    """Agreement of the live routers with the replayed routes, over all layers and layer by layer."""
    stats = gather([found.agreement, found.order_mismatch, float(found.uncaptured), *found.agreement_per_layer])
    mean = stats.mean(axis=0)
    layers = {
        f"routes/agreement_layer_{layer}": float(value) for layer, value in zip(found.layers, mean[3:], strict=True)
    }
    return {
        "routes/agreement": float(mean[0]),
        "routes/order_mismatch": float(mean[1]),
        "routes/uncaptured": float(stats[:, 2].sum()),
        **layers,
    }
