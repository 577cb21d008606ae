import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.traces import (
    ArrayField,
    SupportField,
    SupportRows,
    Trajectory,
    TrajectoryBatch,
    TrajectoryError,
    TrajectoryTrace,
)
from trl_support_replay.traces.columns import table_to_traces, traces_to_table

FIELDS = (SupportField(), ArrayField("score", np.float32, fill=0))


def made(i: int, fields=FIELDS, **info) -> Trajectory:
    """Trajectory `i`: `i % 3 + 1` tokens of which every value tells `i`."""
    size = i % 3 + 1
    side = {"support": SupportRows.from_ragged([[i, i + 1]] * size), "score": np.full(size, i, np.float32)}
    trace = TrajectoryTrace([i], fields)
    trace.append_sampled([i] * size, [-float(i)] * size, **{spec.name: side[spec.name] for spec in fields})
    return trace.finalize(info={"identity": i, **info})


def identities(batch: TrajectoryBatch) -> list[int]:
    for trajectory in batch:
        i = trajectory.info["identity"]
        assert trajectory == made(i)
    return [trajectory.info["identity"] for trajectory in batch]


@given(st.integers(0, 6), st.data())
def test_chosen_trajectories_bring_all_they_hold(size, data):
    batch = TrajectoryBatch([made(i) for i in range(size)])
    plain = list(range(size))
    index = data.draw(st.lists(st.integers(-size, size - 1), max_size=8)) if size else []
    assert identities(batch[index]) == [plain[i] for i in index]
    assert identities(batch[torch.tensor(index, dtype=torch.int64)]) == [plain[i] for i in index]
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    kept = [i for i, keep in zip(plain, mask, strict=True) if keep]
    assert identities(batch[np.array(mask, dtype=bool)]) == kept
    assert identities(batch[torch.tensor(mask, dtype=torch.bool)]) == kept
    piece = data.draw(st.slices(size))
    assert identities(batch[piece]) == plain[piece]
    assert identities(batch[piece] + batch) == plain[piece] + plain


def test_replaced_trajectories_leave_nothing_of_the_old_ones():
    batch = TrajectoryBatch([made(i) for i in range(5)])
    assert identities(batch.replaced([3, 0], [made(7), made(8)])) == [8, 1, 2, 7, 4]
    assert identities(batch) == [0, 1, 2, 3, 4]
    with pytest.raises(TrajectoryError, match="1 trajectories for 2 places"):
        batch.replaced([1, 2], [made(7)])


def test_a_rollout_that_drops_a_field_fails_where_the_batch_is_built():
    with pytest.raises(TrajectoryError, match="Trajectory 1 has fields"):
        TrajectoryBatch([made(0), made(1, fields=FIELDS[:1])])
    with pytest.raises(TrajectoryError, match=r"Trajectory 1 has info \['identity'\], trajectory 0 has .*reward"):
        TrajectoryBatch([made(0, reward=1.0), made(1)])


def mixed(reward: float) -> Trajectory:
    trace = TrajectoryTrace([1, 2], eos_token_ids=[9])
    trace.append_sampled([5, 6], [-0.5, 0.0], support=SupportRows.from_ragged([[5, 7], [6]]))
    trace.append_observation([8])
    trace.append_sampled([5], [-0.25], support=SupportRows.from_ragged([[5, 6]]))
    trace.append_synthetic_eos(9)
    return trace.finalize(info={"reward": reward})


def test_a_rollout_has_what_the_trainer_asks_for():
    rollout = TrajectoryBatch([mixed(1.0), mixed(2.0)]).rollout()
    assert rollout == {
        "prompt_ids": [[1, 2]] * 2,
        "completion_ids": [[5, 6, 8, 5, 9]] * 2,
        "logprobs": [[-0.5, 0.0, 0.0, -0.25, 0.0]] * 2,
        "env_mask": [[1, 1, 0, 1, 1]] * 2,
        "support_ids": [SupportRows.from_ragged([[5, 7], [6], [], [5, 6], []])] * 2,
        "reward": [1.0, 2.0],
    }
    assert TrajectoryBatch([]).rollout()["support_ids"] == []


@pytest.mark.parametrize("name", ["logprobs", "env_mask", "support_ids", "routed_experts"])
def test_info_does_not_take_the_place_of_what_a_rollout_has(name):
    trace = TrajectoryTrace([1])
    trace.append_sampled([5], [-0.5], support=SupportRows.from_ragged([[5, 7]]))
    with pytest.raises(TrajectoryError, match=rf"info has \['{name}'\]"):
        TrajectoryBatch([trace.finalize(info={name: 1.0})]).rollout()


def test_a_trajectory_becomes_a_row_of_a_traces_dataset():
    trajectory = mixed(1.0)
    table = traces_to_table([trajectory.to_trace()], model="m", sampling={}, engine={})
    (trace,) = table_to_traces(table)
    trace.check()
    assert trace.supports == trajectory.support and trace.extra == {"reward": 1.0}
    assert trace.loss_mask.tolist() == trajectory.loss_mask.tolist()
    np.testing.assert_array_equal(trace.sampling_logprobs, trajectory.logprobs)
    with pytest.raises(TrajectoryError, match=r"this has \['score', 'support'\]"):
        made(0).to_trace()


def test_an_empty_batch_works():
    batch = TrajectoryBatch([])
    assert len(batch) == 0 and batch.fields == ()
    assert len(batch[[]]) == len(batch[:]) == len(batch + batch) == len(batch[np.zeros(0, bool)]) == 0


def test_refuses_what_chooses_nothing():
    batch = TrajectoryBatch([made(0), made(1)])
    with pytest.raises(TrajectoryError, match="mask of 3 chooses among 2"):
        batch[[True, False, True]]
    with pytest.raises(TypeError, match="integers or a boolean mask"):
        batch[[0.0]]
    with pytest.raises(TypeError, match="integers or a boolean mask"):
        batch[True]
