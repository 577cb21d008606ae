"""Log-probs of whole supports against their definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_support_replay.scoring import LMHead, LoRAFactors, SupportCSR, VocabShard, score_candidates

from .oracle import logits_of


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_candidate_has_its_logprob_in_the_order_of_the_rows(data):
    vocab, width = 23, 5
    rows = data.draw(st.lists(st.lists(st.integers(0, vocab - 1), max_size=9, unique=True), min_size=1, max_size=9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    head = LMHead(
        normal(vocab, width),
        bias=normal(vocab),
        logit_scale=0.7,
        softcap=data.draw(st.sampled_from([None, 3.0])),
        lora=data.draw(st.sampled_from([None, LoRAFactors(normal(2, width).float(), normal(vocab, 2).float(), 0.5)])),
    )
    hidden = normal(len(rows), width)
    got = score_candidates(hidden, head, SupportCSR.from_lists(rows), temperature=0.6).tolist()
    logits = logits_of(hidden, head, 0.6)
    want = [v for z, row in zip(logits, rows, strict=True) if row for v in torch.log_softmax(z[row], 0).tolist()]
    assert got == pytest.approx(want, abs=1e-5)


def test_what_has_no_scores_is_refused():
    head = LMHead(torch.zeros(4, 3), shard=VocabShard(0, 4, object()))
    with pytest.raises(ValueError, match="a shard of it"):
        score_candidates(torch.zeros(1, 3), head, SupportCSR.from_lists([[1, 2]]))
    with pytest.raises(ValueError, match=r"shape \(2, 3\) for 1 supports"):
        score_candidates(torch.zeros(2, 3), LMHead(torch.zeros(4, 3)), SupportCSR.from_lists([[1, 2]]))
    head = LMHead(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="temperature=0"):
        score_candidates(torch.zeros(1, 3), head, SupportCSR.from_lists([[1, 2]]), temperature=0)
    with pytest.raises(ValueError, match="row 0 has id 4; the head has ids 0 to 3"):
        score_candidates(torch.zeros(1, 3), head, SupportCSR.from_lists([[1, 4]]))
