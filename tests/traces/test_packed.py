import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_support_replay.traces.packed import PackedTensor

lengths = st.lists(st.integers(0, 4), max_size=8)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64])


def pack(sizes, dtype=torch.float32, shape=()):
    """Samples of which every value is its own place, cut to the type."""
    total = sum(sizes)
    values = torch.arange(total * int(np.prod(shape))).reshape(total, *shape).to(dtype)
    packed = PackedTensor(values, [0, *itertools.accumulate(sizes)])
    return packed, list(values.split(sizes)) if sizes else []


def assert_holds(packed, samples, like):
    assert isinstance(packed, PackedTensor)
    assert packed.dtype == like.dtype and packed.values.shape[1:] == like.values.shape[1:]
    assert len(packed) == len(samples) and packed.lengths.tolist() == [len(sample) for sample in samples]
    for found, sample, indexed in zip(packed, samples, range(len(samples)), strict=True):
        assert torch.equal(found, sample) and torch.equal(packed[indexed], sample)


@given(lengths, dtypes, st.sampled_from([(), (2,), (3, 2)]), st.data())
def test_chooses_as_lists_do(sizes, dtype, shape, data):
    packed, samples = pack(sizes, dtype, shape)
    assert_holds(packed, samples, packed)
    piece = data.draw(st.slices(len(sizes)))
    assert_holds(packed[piece], samples[piece], packed)
    index = data.draw(st.lists(st.integers(-len(sizes), len(sizes) - 1), max_size=8)) if sizes else []
    for form in (index, torch.tensor(index, dtype=torch.int32), np.array(index, dtype=np.int64)):
        assert_holds(packed[form], [samples[i] for i in index], packed)
    mask = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    kept = [sample for sample, keep in zip(samples, mask, strict=True) if keep]
    for form in (torch.tensor(mask, dtype=torch.bool), np.array(mask, dtype=bool)):
        assert_holds(packed[form], kept, packed)


@given(lengths, st.integers(1, 5), st.data())
def test_splits_and_joins(sizes, size, data):
    packed, samples = pack(sizes)
    parts = packed.split(size)
    assert [len(part) for part in parts] == [len(samples[i : i + size]) for i in range(0, len(samples), size)]
    cut = data.draw(st.integers(0, len(sizes)))
    halves = packed.split([cut, len(sizes) - cut])
    assert_holds(halves[0], samples[:cut], packed)
    assert_holds(halves[1], samples[cut:], packed)
    assert_holds(PackedTensor.concatenate(halves), samples, packed)
    if samples:
        assert_holds(PackedTensor.concatenate(parts), samples, packed)
        assert_holds(PackedTensor.from_samples(samples), samples, packed)


def test_a_mask_filters_and_does_not_index():
    # Read as integers, this mask would be the samples 1, 0, 1.
    packed, samples = pack([1, 2, 3])
    assert_holds(packed[torch.tensor([True, False, True])], [samples[0], samples[2]], packed)
    assert_holds(packed[[True, False, True]], [samples[0], samples[2]], packed)


def test_views_are_views():
    packed, _ = pack([1, 2, 3])
    start = packed.values.data_ptr()
    assert packed[1].data_ptr() == packed[1:].values.data_ptr() == start + 4
    assert packed.split(2)[1].values.data_ptr() == start + 12
    assert packed.to("cpu") is packed


@given(lengths, dtypes)
def test_pickle_and_save_keep_type_and_lengths(sizes, dtype):
    packed, samples = pack(sizes, dtype, (2,))
    assert_holds(pickle.loads(pickle.dumps(packed)), samples, packed)
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    with torch.serialization.safe_globals([PackedTensor]):
        assert_holds(torch.load(file, weights_only=True), samples, packed)


class _Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return pack([i, 2 * i])[0]


def test_a_data_loader_worker_sends_shared_values():
    loader = torch.utils.data.DataLoader(
        _Samples(), batch_size=2, num_workers=1, collate_fn=PackedTensor.concatenate, timeout=120
    )
    first, second = loader
    assert first.lengths.tolist() == [0, 0, 1, 2] and second.lengths.tolist() == [2, 4, 3, 6]
    assert second.values.is_shared()
    assert second[1].tolist() == [2, 3, 4, 5]


def test_moves_values_and_leaves_lengths_on_the_host():
    packed, _ = pack([1, 2])
    moved = packed.to("meta")
    assert moved.device.type == "meta" and moved.cu_seqlens.device.type == "cpu"
    assert moved[[1, 0]].values.shape == (3,)
    assert packed.to(torch.float64).dtype == torch.float64


def test_gradients_reach_the_samples():
    values = torch.arange(6.0, requires_grad=True)
    packed = PackedTensor(values, [0, 1, 3, 6])
    packed[[2, 0, 2]].values.sum().backward()
    assert values.grad.tolist() == [1, 0, 0, 2, 2, 2]


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 2], [1, 3], [], [0, 4, 3], [0.0, 3.0], [[0, 3]], [False, True]], ids=lambda x: str(x)
)
def test_refuses_lengths_that_do_not_cover_the_values(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens"):
        PackedTensor(torch.zeros(3), cu_seqlens)


def test_refuses_what_cannot_be_joined_or_chosen():
    packed, _ = pack([1, 2])
    wide, _ = pack([1], shape=(2,))
    with pytest.raises(ValueError, match=r"part 1 holds torch.float32 of shape \(1, 2\), part 0 .*\(3,\)"):
        PackedTensor.concatenate([packed, wide])
    with pytest.raises(ValueError, match="sample 1 holds torch.int64"):
        PackedTensor.from_samples([torch.zeros(1), torch.zeros(1, dtype=torch.int64)])
    for join in (PackedTensor.concatenate, PackedTensor.from_samples):
        with pytest.raises(ValueError, match="^No "):
            join([])
    with pytest.raises(ValueError, match=r"\[1, 2\] samples do not add up to 2"):
        packed.split([1, 2])
    with pytest.raises(ValueError, match="packs of 0"):
        packed.split(0)
    for index in (2, -3, [0, 2]):
        with pytest.raises(IndexError, match="outside 2 samples"):
            packed[index]
    for mask in (torch.tensor([True]), True):
        with pytest.raises(IndexError, match="mask of shape"):
            packed[mask]
    with pytest.raises(TypeError, match="integers or a boolean mask"):
        packed[[0.5]]
