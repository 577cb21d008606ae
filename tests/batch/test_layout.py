"""The layout of a batch: made once for all passes that score it, and never that of other samples."""

import copy

import numpy as np
import pytest
import torch

from trl_support_replay.batch.layout import BatchLayout, SampleBatch, recorded_mask
from trl_support_replay.scoring import candidates, plan
from trl_support_replay.traces.columns import Trace
from trl_support_replay.traces.support import SupportRows

CPU = torch.device("cpu")


def trace(prompt, completion, mask=None):
    rows = SupportRows.from_ragged([[token, token + 1] for token in completion])
    return Trace(
        np.array(prompt, np.int32),
        np.array(completion, np.int32),
        np.ones(len(completion), bool) if mask is None else np.array(mask, bool),
        np.full(len(completion), -1, np.float32),
        rows,
    )


@pytest.mark.parametrize("per_call", [2, 4])
def test_supports_are_planned_once_for_all_passes(build, tiny_model_path, monkeypatch, per_call):
    """Two micro-batches, scored for the old policy, the reference, the check, and the losses of two iterations."""
    made, copies = [], []

    def counted(ids, *args, **kwargs):
        made.append(len(ids))
        return make_plan(ids, *args, **kwargs)

    def sent(item, device):
        copies.append(device)
        return to_device(item, device)

    make_plan, to_device = plan.make_plan, plan.to_device
    monkeypatch.setattr(candidates, "make_plan", counted)
    for module in (plan, candidates):
        monkeypatch.setattr(module, "to_device", sent)
    monkeypatch.setattr("trl_support_replay.batch.layout.to_device", sent)
    trainer = build(
        tiny_model_path,
        top_p=0.9,
        beta=0.1,
        num_iterations=2,
        max_steps=2,
        per_device_train_batch_size=per_call,
        gradient_accumulation_steps=2,
        num_generations=per_call,
    )
    made.clear()  # those of the probe of both models
    copies.clear()
    trainer.train()
    # TRL shuffles completions in between, so the losses score other micro-batches than the passes before.
    assert len(made) == 2 + 2
    assert len(copies) == 2 * len(made)  # positions, and the plan


def test_other_samples_in_the_same_list_get_another_layout():
    one, two = trace([5], [6, 7]), trace([5], [8, 9])
    batch = SampleBatch.of([one, two])
    first = batch.layout(0, (2, 3), 2, CPU)
    assert batch.layout(0, (2, 3), 2, CPU) is first
    assert SampleBatch.of(batch) is batch
    batch.reverse()
    second = batch.layout(0, (2, 3), 2, CPU)
    assert first.positions.sampled_ids.tolist() == [6, 7, 8, 9]
    assert second.positions.sampled_ids.tolist() == [8, 9, 6, 7]
    assert batch.layout(1, (1, 3), 2, CPU).positions.sampled_ids.tolist() == [6, 7]
    assert batch.layout(0, (2, 5), 3, CPU).positions.states.tolist() == [1, 2, 6, 7]


def test_a_sample_that_took_the_place_of_another_gets_its_own_layout():
    batch = SampleBatch.of([trace([5], [6, 7])])
    for token in range(300):
        batch.clear()
        batch.append(trace([5], [6, token]))  # soon at an address where an earlier one was
        assert batch.layout(0, (1, 3), 2, CPU).positions.sampled_ids.tolist() == [6, token]


def test_a_changed_mask_gets_another_layout():
    batch = SampleBatch.of([trace([5], [6, 7])])
    batch.layout(0, (1, 3), 2, CPU)
    batch[0].loss_mask[0] = False
    assert batch.layout(0, (1, 3), 2, CPU).positions.sampled_ids.tolist() == [7]


def test_a_batch_may_be_made_as_any_list():
    batch = SampleBatch.of([trace([5], [6, 7])])
    batch.layout(0, (1, 3), 2, CPU)
    for other in (type(batch)(sample for sample in batch), copy.copy(batch), copy.deepcopy(batch)):
        assert other.layout(0, (1, 3), 2, CPU).positions.sampled_ids.tolist() == [6, 7]


def test_large_layouts_are_not_kept(monkeypatch):
    monkeypatch.setattr("trl_support_replay.batch.layout._KEPT_PAIRS", 3)
    batch = SampleBatch.of([trace([5], [6, 7])])
    assert batch.layout(0, (1, 3), 2, CPU) is not batch.layout(0, (1, 3), 2, CPU)


def test_positions_are_those_of_the_states_that_predict():
    samples = [trace([1, 2], [3, 4, 5], mask=[1, 0, 1]), trace([1], [6])]
    layout = BatchLayout.build(samples, (2, 6), 3, CPU)
    assert layout.positions.states.tolist() == [2, 4, 6 + 2]
    assert layout.positions.sampled_ids.tolist() == [3, 5, 6]
    spread = layout.spread(torch.tensor([1.0, 2.0, 3.0]))
    assert spread.tolist() == [[0, 0, 1, 0, 2], [0, 0, 3, 0, 0]]
    assert recorded_mask(samples, (2, 3)).tolist() == [[True, False, True], [True, False, False]]
    with pytest.raises(ValueError, match="Sample 0 has 3 tokens in 2 columns"):
        BatchLayout.build(samples, (2, 6), 2, CPU)
    with pytest.raises(ValueError, match="2 recorded samples for a batch of 3 rows"):
        BatchLayout.build(samples, (3, 6), 3, CPU)


def test_a_plan_is_sent_by_one_copy(monkeypatch):
    offsets = np.arange(0, 4 * 40 + 1, 4)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(4 * 40).reshape(40, 4) % 50, (1, 1)), axis=1).reshape(-1)
    made = plan.make_plan(ids, offsets, 0, 50, kernel="union", device=CPU)
    sent = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *args, **kwargs: sent.append(args) or to(self, *args, **kwargs)
    )
    there = plan.to_device(made, "meta")
    assert len(sent) == 1
    assert there.rows.device.type == "meta" and there.blocks[0].cells.device.type == "meta"
    assert there.blocks[0].cells.shape == made.blocks[0].cells.shape
    assert np.array_equal(there.host_pair_ids, made.host_pair_ids)
