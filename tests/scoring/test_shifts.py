"""Scores of shifted logits against a float64 oracle that walks through the history token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trl_support_replay.scoring import (
    CandidateShifts,
    LMHead,
    SupportCSR,
    score_candidates,
    score_support,
    score_support_from_logits,
)
from trl_support_replay.traces.shifts import LogitShifts

from .inputs import ALL, head_and_states
from .oracle import logits_of

VOCAB, LENGTH, TEMPERATURE = 24, 40, 0.7
PROMPT = np.array([3, 5, 5, 8, 21])
BIAS = {2: 1.5, 5: -2.0, 7: 0.25}
SETTINGS = {
    "repetition": LogitShifts(repetition_penalty=1.3),
    "presence": LogitShifts(presence_penalty=0.7),
    "frequency": LogitShifts(frequency_penalty=-0.5),
    "bias": LogitShifts(logit_bias=BIAS),
    "all": LogitShifts(1.3, 0.7, 0.5, BIAS),
}


def request(settings: LogitShifts, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.permutation(VOCAB)[: rng.integers(1, 12)]).tolist() for _ in range(LENGTH)]
    output = [int(rng.choice(row)) for row in rows]
    support = SupportCSR.from_lists(rows)
    shifts = CandidateShifts(*settings.of_request(PROMPT, np.array(output), support.token_ids, support.offsets))
    return output, rows, SupportCSR.from_numpy(support.token_ids, support.offsets, shifts=shifts)


def shifted_rows(logits, settings, output, rows):
    """The candidates' shifted logits over temperature, row by row, from logits before temperature."""
    found = []
    for t, row in enumerate(rows):
        values = []
        for token in row:
            z = logits[t, token] + settings.logit_bias.get(token, 0.0)
            if token in PROMPT or token in output[:t]:
                z = z / settings.repetition_penalty if z > 0 else z * settings.repetition_penalty
            count = output[:t].count(token)
            values.append(z - settings.frequency_penalty * count - settings.presence_penalty * (count > 0))
        found.append(torch.stack(values) / TEMPERATURE)
    return found


def oracle(logits, settings, output, rows):
    logprobs = [torch.log_softmax(row, 0) for row in shifted_rows(logits, settings, output, rows)]
    return {
        "logprobs": torch.stack([x[row.index(a)] for x, row, a in zip(logprobs, rows, output, strict=True)]),
        "support_entropy": torch.stack([-(x.exp() * x).sum() for x in logprobs]),
    }


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("implementation", (*ALL, "from_logits"))
@pytest.mark.parametrize("whole", [False, True])
def test_scores_and_gradients_are_those_of_the_shifted_distribution(name, implementation, whole):
    """`whole`: the pairs come from a projection on the whole vocabulary, whose own scores are not shifted."""
    settings = SETTINGS[name]
    output, rows, support = request(settings)
    hidden, weight = head_and_states(LENGTH, 8, VOCAB, dtype=torch.float64)
    head, ids = LMHead(weight, softcap=2.0), torch.tensor(output)
    outputs = ("logprobs", "support_entropy", *(("full_logprobs",) if whole else ()))
    if implementation == "from_logits":
        logits = logits_of(hidden, head)
        scores = score_support_from_logits(logits, ids, support, temperature=TEMPERATURE, outputs=outputs)
    else:
        scores = score_support(
            hidden, head, ids, support, temperature=TEMPERATURE, outputs=outputs, implementation=implementation
        )
    want = oracle(logits_of(hidden, head), settings, output, rows)
    if whole:
        plain = torch.log_softmax(logits_of(hidden, head, TEMPERATURE), -1)
        want["full_logprobs"] = plain.gather(1, ids[:, None])[:, 0]
    upstream = torch.linspace(-1, 1, LENGTH, dtype=torch.float64)
    for key in outputs:
        got = getattr(scores, key)
        torch.testing.assert_close(got, want[key], rtol=1e-10, atol=1e-10)
        pair = [
            torch.autograd.grad((x * upstream).sum(), (hidden, weight), retain_graph=True) for x in (got, want[key])
        ]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_without_its_shifts_a_score_is_another(name):
    output, rows, support = request(SETTINGS[name])
    hidden, weight = head_and_states(LENGTH, 8, VOCAB, dtype=torch.float64)
    settings = {"temperature": TEMPERATURE}
    scored = [
        score_support(hidden, LMHead(weight), torch.tensor(output), x, **settings).logprobs
        for x in (support, SupportCSR.from_lists(rows))
    ]
    assert (scored[0] - scored[1]).abs().max() > 1e-2


def test_all_candidates_are_scored_with_their_shifts():
    settings = SETTINGS["all"]
    output, rows, support = request(settings)
    hidden, weight = head_and_states(LENGTH, 8, VOCAB, dtype=torch.float64)
    head = LMHead(weight)
    want = shifted_rows(logits_of(hidden, head), settings, output, rows)
    got = score_candidates(hidden, head, support, temperature=TEMPERATURE)
    torch.testing.assert_close(got, torch.cat([torch.log_softmax(row, 0) for row in want]), rtol=1e-10, atol=1e-10)


def test_shifts_stay_with_their_candidates():
    """In rows that are taken, and in the places among the union by which fetched head rows are scored."""
    settings = SETTINGS["all"]
    output, _, support = request(settings)
    hidden, weight = head_and_states(LENGTH, 8, VOCAB, dtype=torch.float64)
    ids = torch.tensor(output)
    want = score_support(hidden, LMHead(weight), ids, support).logprobs
    order = np.random.default_rng(1).permutation(LENGTH)
    taken = score_support(hidden[order], LMHead(weight), ids[order], support.take(order)).logprobs
    torch.testing.assert_close(taken, want[order], rtol=1e-12, atol=1e-12)
    distinct, union, places = support.by_union
    fetched = score_support(hidden, LMHead(weight[union]), torch.searchsorted(union, ids), places).logprobs
    torch.testing.assert_close(fetched, want, rtol=1e-12, atol=1e-12)
    assert len(distinct) <= VOCAB


def test_padding_counts_as_seen_where_it_is_given_with_the_prompt():
    """As in transformers, whose penalty sees the padded ids."""
    ids, offsets, pad = np.array([0, 1]), np.array([0, 2]), 0
    settings = LogitShifts(repetition_penalty=2.0)
    _, bare, _ = settings.of_request(np.array([9]), np.array([1]), ids, offsets)
    _, padded, _ = settings.of_request(np.array([pad, 9]), np.array([1]), ids, offsets)
    assert bare.tolist() == [1, 1] and padded.tolist() == [2, 1]


def test_what_cannot_be_scored_is_refused_by_name():
    output, _, support = request(SETTINGS["all"])
    hidden, weight = head_and_states(LENGTH, 8, VOCAB)
    with pytest.raises(ValueError, match=r"outputs has log_mass, and the supports carry shifts"):
        score_support(hidden, LMHead(weight), torch.tensor(output), support, outputs=("log_mass",))
    with pytest.raises(ValueError, match="repetition_penalty=0 is not above 0"):
        LogitShifts(repetition_penalty=0)
    with pytest.raises(ValueError, match=r"presence_penalty=nan is not finite"):
        LogitShifts(presence_penalty=float("nan"))
    with pytest.raises(ValueError, match=r"logit_bias=\{4: -inf\} is not finite"):
        LogitShifts(logit_bias={4: float("-inf")})
    with pytest.raises(ValueError, match="2 supports for 1 output tokens"):
        LogitShifts().of_request(PROMPT, np.array([1]), np.array([1, 2]), np.array([0, 1, 2]))
    one = np.ones(1)
    with pytest.raises(ValueError, match="1 shifts for 2 token ids"):
        SupportCSR.from_numpy([1, 2], [0, 2], shifts=CandidateShifts(one, one, one))
    with pytest.raises(ValueError, match="of one length"):
        CandidateShifts(one, one, np.ones(2))
    with pytest.raises(ValueError, match="A repetition penalty is above 0, not 0"):
        CandidateShifts(one, one * 0, one)
    with pytest.raises(ValueError, match="Shifts are finite"):
        CandidateShifts(one * -np.inf, one, one)


@pytest.mark.parametrize("implementation", ALL)
def test_a_lone_candidate_scores_zero_however_it_is_shifted(implementation):
    shifts = CandidateShifts(*(np.array([x]) for x in (3.0, 1.5, 0.5)))
    support = SupportCSR.from_numpy([4], [0, 1], shifts=shifts)
    hidden, weight = head_and_states(1, 8, VOCAB)
    scores = score_support(hidden, LMHead(weight), torch.tensor([4]), support, implementation=implementation)
    scores.logprobs.sum().backward()
    assert scores.logprobs.item() == 0 and not hidden.grad.any()


def test_parts_are_joined_one_after_another():
    parts = [request(settings)[2].shifts for settings in SETTINGS.values()]
    whole = CandidateShifts.concatenate(parts)
    assert len(whole) == sum(map(len, parts)) and len(CandidateShifts.concatenate([])) == 0
    for name in ("bias", "factor", "penalty"):
        np.testing.assert_array_equal(getattr(whole, name)[-len(parts[-1]) :], getattr(parts[-1], name))
