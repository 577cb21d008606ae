"""Golden values and gradients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trl_support_replay.scoring import LMHead, SupportCSR, score_support, score_support_from_logits

CASES = {case["name"]: case for case in json.loads((Path(__file__).parent / "scoring.json").read_text())}
NAMES = {
    "logprobs": "support_logprob",
    "support_entropy": "support_entropy",
    "full_logprobs": "full_logprob",
    "full_entropy": "full_entropy",
    "log_mass": "log_mass",
}
SUPPORT_OUTPUTS = ("logprobs", "support_entropy")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


def score(case, implementation, dtype, outputs):
    hidden = torch.tensor(case["hidden"], dtype=dtype, requires_grad=True)
    weight = torch.tensor(case["weight"], dtype=dtype, requires_grad=True)
    bias = None if case["bias"] is None else torch.tensor(case["bias"], dtype=dtype)
    sampled = torch.tensor(case["sampled"])
    support = SupportCSR.from_lists(case["support"])
    softcap, temperature = case["options"].get("softcap"), case["options"].get("temperature", 1.0)
    if implementation == "from_logits":
        logits = hidden @ weight.T + (0 if bias is None else bias)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        scores = score_support_from_logits(
            logits, sampled, support, temperature=temperature, outputs=outputs, empty_rows="full"
        )
    else:
        scores = score_support(
            hidden,
            LMHead(weight, bias, softcap=softcap),
            sampled,
            support,
            temperature=temperature,
            outputs=outputs,
            implementation=implementation,
            empty_rows="full",
        )
    return hidden, weight, scores


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("outputs", [SUPPORT_OUTPUTS, tuple(NAMES)], ids=["support", "all"])
@pytest.mark.parametrize("implementation", ["reference", "union", "sparse", "from_logits"])
@pytest.mark.parametrize("name", CASES)
def test_golden_values_and_gradients(name, implementation, outputs, dtype):
    case, tolerance = CASES[name], TOLERANCE[dtype]
    hidden, weight, scores = score(case, implementation, dtype, outputs)
    recorded = torch.tensor([len(row) > 0 for row in case["support"]])
    for output in outputs:
        values = getattr(scores, output)
        assert values.dtype == dtype
        expected = torch.tensor([e.get(NAMES[output], float("nan")) for e in case["expected"]], dtype=dtype)
        # The cases leave rows without support open for support scores.
        on = recorded if output in (*SUPPORT_OUTPUTS, "log_mass") else torch.ones_like(recorded)
        torch.testing.assert_close(values[on], expected[on], rtol=tolerance, atol=tolerance)

    upstream = torch.tensor(case["upstream"], dtype=dtype) * recorded
    (scores.logprobs * upstream).sum().backward()
    torch.testing.assert_close(
        hidden.grad, torch.tensor(case["expected_grad_hidden"], dtype=dtype), rtol=tolerance, atol=tolerance
    )
    expected = torch.zeros_like(weight)
    for row, values in case["expected_grad_weight_rows"].items():
        expected[int(row)] = torch.tensor(values, dtype=dtype)
    torch.testing.assert_close(weight.grad, expected, rtol=tolerance, atol=tolerance)
