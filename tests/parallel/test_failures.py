"""What fails on one process alone ends all of them within seconds, each with its message."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from trl_support_replay.parallel.processes import agreeing, alone

SECONDS = 30  # the groups of the tests give up after 60


def assert_all_told(found, error, message):
    """Rank 1 raised `error` with `message`, and rank 0 tells so."""
    assert found[1][0] == error and message in found[1][1]
    assert found[0][0] == "OtherProcessError" and found[0][1].startswith(f"process 1: {error}: ")
    assert message in found[0][1]
    assert max(seconds for _, _, seconds in found) < SECONDS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_on_ranks(2, "tests.parallel.fault_cases:failures", str(tmp_path_factory.mktemp("runs")))


def test_a_block_fails_on_all_processes_or_on_none(ranks):
    for case in ("own_work", "before_a_gather", "between_gathers", "after_the_last_gather"):
        assert_all_told([rank[case] for rank in ranks], "ValueError", "no space left")
    # Each that fails itself raises its own error.
    assert [rank["on_both"][:2] for rank in ranks] == [("ValueError", "rank 0"), ("ValueError", "rank 1")]
    assert all(rank["gathered"] == [1.0, 2.0] and not rank["left behind"] for rank in ranks)


def test_a_single_process_exchanges_nothing(monkeypatch):
    import trl_support_replay.parallel.processes as module

    monkeypatch.setattr(module, "gather", None)
    with agreeing():
        pass
    with pytest.raises(ValueError, match="as it was"), agreeing(), alone():
        raise ValueError("as it was")


def test_a_trainer_ends_on_all_processes(ranks):
    for case, error, message in (
        ("reading what was generated", "RuntimeError", "the scores cannot be read"),
        ("a rollout's supports", "SupportError", "completion 1: the support of token 2 (2 ids) does not hold"),
        ("writing traces", "ShardFolderError", "cannot be written (File too large)"),
        ("the folder of traces", "ShardFolderError", "is not a folder that can be written"),
        ("saved traces", "TraceSchemaError", "row 0: token 0 has log-prob -inf"),
    ):
        assert_all_told([rank[case] for rank in ranks], error, message)
    assert [rank["nothing"][0] for rank in ranks] == ["", ""]
    assert ranks[0]["shards"] == ["traces-00000000-000-00000.parquet", "traces-00000000-000-00001.parquet"]
