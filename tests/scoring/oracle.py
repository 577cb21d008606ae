"""Scores written out from their definitions, in float64, one token at a time."""

from __future__ import annotations

import torch

from trl_support_replay.scoring import CandidateShifts, LMHead


def logits_of(hidden: torch.Tensor, head: LMHead, temperature: float = 1.0) -> torch.Tensor:
    weight = head.weight.double()
    if head.lora is not None:
        weight = weight + head.lora.scaling * head.lora.b.double() @ head.lora.a.double()
    z = hidden.double() @ weight.T
    if head.bias is not None:
        z = z + head.bias.double()
    z = z * head.logit_scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / temperature


def scores_from_logits(logits: torch.Tensor, sampled: list[int], rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """All five scores; an empty row is scored over the whole vocabulary."""
    out: dict[str, list[torch.Tensor]] = {}
    for z, a, row in zip(logits.double(), sampled, rows, strict=True):
        ids = sorted(row) or list(range(len(z)))
        full, support = torch.log_softmax(z, 0), torch.log_softmax(z[ids], 0)
        for name, value in (
            ("logprobs", support[ids.index(a)]),
            ("support_entropy", -(support.exp() * support).sum()),
            ("full_logprobs", full[a]),
            ("full_entropy", -(full.exp() * full).sum()),
            ("log_mass", torch.logsumexp(full[ids], 0) if row else z.sum() * 0),
        ):
            out.setdefault(name, []).append(value)
    return {name: torch.stack(values) for name, values in out.items()}


def oracle_scores(
    hidden: torch.Tensor,
    head: LMHead,
    sampled: list[int],
    rows: list[list[int]],
    temperature: float = 1.0,
    shifts: CandidateShifts | None = None,
) -> dict[str, torch.Tensor]:
    """With shifts, of rows without an empty one, the scores over the support are the shifted ones."""
    if shifts is None:
        return scores_from_logits(logits_of(hidden, head, temperature), sampled, rows)
    places = torch.tensor([[i, v] for i, row in enumerate(rows) for v in row]).T
    z = logits_of(hidden, head)[tuple(places)] + torch.from_numpy(shifts.bias)
    factor = torch.from_numpy(shifts.factor)
    z = torch.where(z > 0, z / factor, z * factor) - torch.from_numpy(shifts.penalty)
    logits = torch.full((len(rows), head.weight.shape[0]), -1e3).double().index_put(tuple(places), z / temperature)
    return scores_from_logits(logits, sampled, rows)
