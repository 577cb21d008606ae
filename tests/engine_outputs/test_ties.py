"""Equal logits at the k-th place: how many there are in each data type, and what is made of lists that cut them."""

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from tests.parts import require
from tests.processes import environment
from trl_support_replay.engine_outputs.errors import SupportCaptureError
from trl_support_replay.engine_outputs.vllm_outputs import num_candidates, read_flat_logprobs

require("vllm")
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402

from .test_vllm_outputs import completion, flat, log  # noqa: E402

# Spreads and means of logits, in nats: random rows around them are as flat as a model's rows get at the k-th place.
SHAPES = [(1.5, 0.0), (2.0, 12.0), (3.0, 12.0), (2.0, 24.0), (4.0, 24.0), (1.5, 12.0)]


def survivors(logits, top_k):
    """`[T, V]` processed log-probs of vLLM's own top-k, which keeps all ties."""
    k = torch.full((len(logits),), top_k)
    return apply_top_k_top_p_pytorch(logits.float().clone(), k, None, allow_cpu_sync=True).log_softmax(-1)


def reported(logprobs, width, generator):
    """What vLLM reports of a completion that draws from `logprobs`: each token, then its `width` best candidates."""
    drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)
    top = logprobs.topk(width)
    ids = torch.cat([drawn, top.indices], 1).tolist()
    values = torch.cat([logprobs.gather(1, drawn), top.values], 1).tolist()
    return completion(
        drawn[:, 0].tolist(), flat([list(zip(*row, strict=True)) for row in zip(ids, values, strict=True)])
    )


def sets(logprobs):
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logprobs]


@pytest.mark.parametrize("top_k", [20, 50, 100])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 47), ("float16", 10), ("float32", 0)])
def test_candidates_hold_twice_the_ties_of_their_data_type(dtype, most, top_k):
    generator = torch.Generator().manual_seed(0)
    ties = []
    for spread, mean in SHAPES:
        logits = (torch.randn(100, 49152, generator=generator) * spread + mean).to(getattr(torch, dtype)).float()
        ties.append(int((logits >= logits.topk(top_k).values[:, -1:]).sum(1).max()) - top_k)
    assert max(ties) <= most
    assert top_k + 1.5 * max(ties) <= num_candidates(top_k, dtype) <= 2 * top_k + 16


def test_the_number_of_candidates_is_bounded():
    assert num_candidates(50, torch.bfloat16) == num_candidates(50, "bfloat16") == num_candidates(50, None)
    assert num_candidates(50, "bfloat16") > num_candidates(50, "float16") > num_candidates(50, "float32")
    assert num_candidates(50, "bfloat16", 99, -1) == num_candidates(50, "bfloat16", 49152, 99) == 99


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("top_k", "spread"), [(50, 3.0), (100, 3.0), (50, 2.0), (20, 2.0)])
def test_rows_with_ties_are_whole(dtype, top_k, spread):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(40, 49152, generator=generator) * spread + 12).to(getattr(torch, dtype))
    logprobs = survivors(logits, top_k)
    _, rows, repaired = read_flat_logprobs(
        reported(logprobs, num_candidates(top_k, dtype, 49152), generator), top_k, "request 0"
    )
    assert repaired == 0 and [set(row) for row in rows.to_lists()] == sets(logprobs)
    assert dtype != "bfloat16" or rows.sizes.max() > top_k + 4


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(0, 12), st.sampled_from([0.25, 1.0, 4.0]))
def test_no_incomplete_row_goes_uncounted(seed, top_k, more, step):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(30, 40, generator=generator) * 3 / step).round() * step
    logprobs = survivors(logits, top_k)
    answer = reported(logprobs, min(top_k + more, 40), generator)
    try:
        values, rows, repaired = read_flat_logprobs(answer, top_k, "request 0")
    except SupportCaptureError as error:
        assert "tie" in str(error) and "instead of 1" in str(error)
        assert any(len(kept) > top_k + more for kept in sets(logprobs))
        return
    differ = [set(row) != kept for row, kept in zip(rows.to_lists(), sets(logprobs), strict=True)]
    assert sum(differ) <= repaired and all(
        set(row) <= kept for row, kept in zip(rows.to_lists(), sets(logprobs), strict=True)
    )
    assert rows.contains(answer.token_ids).all()
    assert values.tolist() == [row[t].item() for row, t in zip(logprobs, answer.token_ids, strict=True)]


def test_ties_too_unlikely_for_the_sum_are_counted_too():
    rare = [(i, math.log(1e-6)) for i in range(10, 14)]
    whole, cut = [(7, 0.0), (7, -4e-6), *rare[:2], (1, -math.inf)], [(7, 0.0), (7, -4e-6), *rare]
    for positions, expected in (([whole, cut], 1), ([whole], 0), ([cut], 1)):
        _, rows, repaired = read_flat_logprobs(completion([7] * len(positions), flat(positions)), 3, "request 0")
        assert repaired == expected and all(7 in row for row in rows)


def test_a_cut_tie_is_counted_when_the_sum_lacks_little():
    likely, rare = log(0.9995, 0.0001)
    position = [(7, likely), (7, likely), *((i, rare) for i in range(10, 14))]  # of five that tie
    _, rows, repaired = read_flat_logprobs(completion([7], flat([position])), 3, "request 0")
    assert repaired == 1 and rows.sizes.tolist() == [5]


def test_a_cut_tie_in_a_long_completion_is_counted_and_logged(caplog):
    fine = [(7, 0.0), (7, 0.0), (8, -math.inf)]
    (p,) = log(0.2)
    cut = [(1, p), *((i, p) for i in range(1, 5))]  # of five that tie
    _, rows, repaired = read_flat_logprobs(completion([7] * 30 + [1], flat([fine] * 30 + [cut])), 3, "request 4")
    assert repaired == 1 and rows.sizes[-1] == 4
    assert "request 4" in caplog.text and "1 of 31" in caplog.text and "tie" in caplog.text


def test_the_sampled_member_of_a_cut_tie_is_added(caplog):
    (p,) = log(0.2)
    position = [(5, p), *((i, p) for i in range(1, 5))]
    _, rows, repaired = read_flat_logprobs(completion([5], flat([position])), 3, "request 4")
    assert sorted(rows[0]) == [1, 2, 3, 4, 5] and repaired == 1
    assert "1 of 1" in caplog.text


def test_a_sampled_token_for_which_there_is_room_is_added():
    a, b = log(0.7, 0.3)
    _, rows, repaired = read_flat_logprobs(completion([5], flat([[(5, b), (1, a), (2, -math.inf)]])), 3, "request 4")
    assert sorted(rows[0]) == [1, 5] and repaired == 1


def tie_of(count, reported_of_it, sampled=1):
    (p,) = log(1 / count)
    return [(sampled, p), *((i, p) for i in range(1, reported_of_it + 1))]


@pytest.mark.parametrize(
    ("position", "top_k", "says"),
    [
        (tie_of(10, 6), 3, "the 6 candidates of token 0 have a total probability of 0.6000.*end within a tie.*top_k=3"),
        (tie_of(10, 6, sampled=9), 3, "6 candidates .* and the sampled id 9 beside them .* 0.7000 .*end within a tie"),
        (
            list(zip([1, 1, 2, 3], log(0.4, 0.4, 0.2, 0.1), strict=True)),
            3,
            "no more than top_k=3, so others may tie .*max_logprobs above top_k.*processed_logprobs",
        ),
        (tie_of(4, 2), 3, "reports no more of them, and top_k=3. Raise its max_logprobs above top_k"),
        (
            [(1, -1.0), (1, -1.0), (2, -2.0), (3, -2.1), (4, -2.2)],
            2,
            "instead of 1. The engine must run with logprobs_mode='processed_logprobs'",
        ),
        ([(1, -1.0), (1, -1.0), (2, -math.inf)], 2, "instead of 1. The engine must run with logprobs_mode="),
        (
            list(zip([9, 1, 2, 3], log(0.3, 0.4, 0.3, 0.3), strict=True)),
            3,
            "the sampled id 9 beside them have a total probability of 1.3000 .*contradicts itself",
        ),
        (
            list(zip([9, 1, 2], log(0.1, 0.5, 0.4), strict=True)),
            2,
            r"token 0 \(id 9\) was sampled with log-prob -2.3026, though 2 candidates are as likely or likelier",
        ),
    ],
)
def test_the_true_cause_is_named(position, top_k, says):
    with pytest.raises(SupportCaptureError, match=f"^request 4: .*{says}"):
        read_flat_logprobs(completion([position[0][0]], flat([position])), top_k, "request 4")


SAMPLE = """
    import json, sys
    from trl_support_replay.engines.generators import CaptureRequest, VLLMGenerator
    from trl_support_replay.settings.contract import SamplingSettings

    request = CaptureRequest(SamplingSettings(top_k=50), num_generations=4, max_tokens=32, seed=0)
    engine = {"max_model_len": 64, "enforce_eager": True, "skip_tokenizer_init": True}
    generator = VLLMGenerator(sys.argv[1], request, "bfloat16", **engine)
    traces = generator.generate([[5, 6, 7], [8, 9]], 0)
    sizes = [size for trace in traces for size in trace.supports.sizes.tolist()]
    print("@found " + json.dumps([sizes, generator.repaired]))
"""


@pytest.mark.slow
def test_a_bfloat16_engine_reports_its_ties_whole(tmp_path):
    """A row is accepted, uncounted, only when its probabilities sum to 1."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32768}
    model = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=2, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, **sizes)
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # the k-th logit is about 15
    model.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SAMPLE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(),
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("@found "))
    sizes, repaired = json.loads(line.removeprefix("@found "))
    assert len(sizes) > 200 and min(sizes) >= 50 and max(sizes) > 54 and repaired == 0
