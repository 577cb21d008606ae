"""Routes and supports of a tiny mixture of experts, both recorded by the real vLLM and replayed by the trainer.

In a process of its own: vLLM sets its expert-parallel group up once a process, and only for a mixture of experts.
"""

import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import environment
from tests.routing.moe_models import qwen3_moe_config, save_model
from tests.tiny_models import character_tokenizer

TRAIN = """
    import json, sys
    import trl.generation.vllm_generation as trl_vllm
    from tests.trainers.conftest import QUIET, checksum_reward, sums
    from tests.trainers.test_routes import CUTS
    from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

    start, engines = trl_vllm.LLM, []

    def one_engine(**kwargs):
        engines[:] = engines or [start(**kwargs)]
        return engines[0]

    trl_vllm.LLM = one_engine
    for name, settings in json.loads(sys.argv[3]).items():
        rollout_func = CUTS.get(settings.pop("cut", None))
        args = SupportReplayGRPOConfig(
            **QUIET | settings, output_dir=sys.argv[2], max_steps=10, max_completion_length=12, learning_rate=1e-3,
            seed=3, use_vllm=True, vllm_max_model_length=256, routed_experts_replay=True,
        )
        trainer = SupportReplayGRPOTrainer(
            sys.argv[1], checksum_reward, args, train_dataset=sums(), rollout_func=rollout_func
        )
        trainer.train()
        print("@log " + json.dumps([name, trainer.state.log_history]))
"""
# Those of a name are sampled by one engine.
RUNS = {
    "truncated": {
        "truncated": {"top_k": 20, "top_p": 0.9},
        "turns that are cut": {"top_k": 20, "cut": "observations behind the cut"},
    },
    "whole vocabulary": {"untruncated": {}},
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """`logs(engine)` are those of its runs, on a tiny Qwen3-MoE with more vocabulary rows than words."""

    @functools.cache
    def run(engine):
        path = tmp_path_factory.mktemp("moe")
        save_model(qwen3_moe_config(), path)
        character_tokenizer().save_pretrained(path)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRAIN), path, path / "run", json.dumps(RUNS[engine])],
            capture_output=True,
            text=True,
            timeout=400,
            env=environment(),
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [line.removeprefix("@log ") for line in done.stdout.splitlines() if line.startswith("@log ")]
        return dict(map(json.loads, lines))

    return run


@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    ("engine", "run"),
    [
        pytest.param("truncated", "truncated", id="truncated"),
        pytest.param("whole vocabulary", "untruncated", id="untruncated", marks=pytest.mark.slow),
        pytest.param("truncated", "turns that are cut", id="turns that are cut"),
    ],
)
def test_ten_steps_with_routes_and_supports_replayed(logs, engine, run):
    found = [log for log in logs(engine)[run] if "routes/agreement" in log]
    assert len(found) == 10
    for log in found:
        assert log["support/logprob_gap_max"] <= 1e-4
        assert abs(log["sampling/importance_sampling_ratio_raw/mean"] - 1) <= 1e-3
        assert log["sampling/outside_10pct"] == 0
        assert log["routes/uncaptured"] == 4  # the last token of each of the 4 completions, which no router saw
        assert log["routes/agreement"] > 0.99  # rounding may tip a router now and then; replay does not mind
