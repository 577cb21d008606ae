"""A completion ends where `generate` stopped it: what `generate` fills in behind is no sampled token."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_support_replay import (
    SupportReplayGRPOConfig,
    SupportReplayGRPOTrainer,
    SupportReplayRLOOConfig,
    SupportReplayRLOOTrainer,
)

GRPO = {"trainer_cls": SupportReplayGRPOTrainer, "config_cls": SupportReplayGRPOConfig}
RLOO = {"trainer_cls": SupportReplayRLOOTrainer, "config_cls": SupportReplayRLOOConfig}
STOPS = list(range(30, 60))  # frequent enough for completions of different lengths


def trained(build, model, tmp_path, **kwargs):
    """A trainer that has run for two steps, and the rows of the traces that it saved."""
    settings = {"top_p": 0.9, "max_completion_length": 24, "save_traces": str(tmp_path / "traces"), "max_steps": 2}
    trainer = build(model, **settings | kwargs)
    trainer.train()
    shards = sorted((tmp_path / "traces").glob("*.parquet"))
    return trainer, [row for shard in shards for row in pq.read_table(shard).to_pylist()]


def assert_ends_at_first_stop(rows, stops, longest):
    lengths = set()
    for row in rows:
        ids = row["completion_ids"]
        assert not set(ids[:-1]) & set(stops) and (ids[-1] in stops or len(ids) == longest)
        assert sum(row["loss_mask"]) == len(ids)
        lengths.add(len(ids))
    assert len(lengths) > 2


@pytest.mark.parametrize("algorithm", [GRPO, RLOO], ids=["GRPO", "RLOO"])
@pytest.mark.parametrize("pad", [{}, {"pad_token_id": 5}], ids=["the tokenizer's pad", "another pad"])
def test_stop_ids_of_generation_kwargs(build, tiny_model_path, tmp_path, algorithm, pad):
    stops = {"eos_token_id": STOPS, **pad}
    trainer, rows = trained(build, tiny_model_path, tmp_path, generation_kwargs=stops, **algorithm)
    assert_ends_at_first_stop(rows, STOPS, longest=24)
    assert trainer.eos_token_ids == STOPS  # where TRL cuts, also in evaluations
    logs = [log for log in trainer.state.log_history if "support/logprob_gap_max" in log]
    assert len(logs) == 2 and all(log["support/logprob_gap_max"] < 1e-4 for log in logs)
    # TRL takes those that end at a stop id for complete.
    clipped = sum(row["completion_ids"][-1] not in STOPS for row in rows) / len(rows)
    assert sum(log["completions/clipped_ratio"] for log in logs) / 2 == pytest.approx(clipped)


def test_completions_that_end_at_a_stop_id_are_not_masked_as_truncated(build, tiny_model_path, tmp_path):
    kwargs = {"generation_kwargs": {"eos_token_id": STOPS}, "mask_truncated_completions": True}
    _, rows = trained(build, tiny_model_path, tmp_path, **kwargs)
    ended = [row["completion_ids"][-1] in STOPS for row in rows]
    assert [any(row["loss_mask"]) for row in rows] == ended and any(ended)


def test_stop_ids_of_the_model(build, tiny_model_path, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.generation_config.eos_token_id = [2, *STOPS]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    trainer, rows = trained(build, model, tmp_path, processing_class=tokenizer)
    assert_ends_at_first_stop(rows, [2, *STOPS], longest=24)
    assert trainer.eos_token_ids == [2, *STOPS]


@pytest.mark.parametrize("off", [-1, None])
@pytest.mark.parametrize("place", ["top_k", "generation_kwargs"])
def test_a_top_k_that_is_off_is_off_in_generate(build, tiny_model_path, off, place):
    """`generate` refuses -1, and takes None for the model's own default, 50."""
    kwargs = {"top_k": off} if place == "top_k" else {"generation_kwargs": {"top_k": off}}
    trainer = build(tiny_model_path, max_steps=1, **kwargs)
    trainer.train()
    assert trainer.generation_config.top_k == 0 and not trainer.replays_support
