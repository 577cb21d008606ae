"""Routes and supports of a tiny mixture of experts, both recorded by the real vLLM and replayed by the trainer.

In a process of its own: vLLM sets its expert-parallel group up once a process, and only for a mixture of experts.
"""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import environment
from tests.routing.moe_models import qwen3_moe_config, save_model

from .conftest import character_tokenizer

TRAIN = """
    import json, sys
    from tests.trainers.conftest import checksum_reward, sums
    from tests.trainers.test_routes import CUTS
    from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

    settings = json.loads(sys.argv[3])
    rollout_func = CUTS.get(settings.pop("cut", None))
    args = SupportReplayGRPOConfig(
        output_dir=sys.argv[2], use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=10,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=12, learning_rate=1e-3, seed=3,
        logging_steps=1, save_strategy="no", use_vllm=True, vllm_max_model_length=256, routed_experts_replay=True,
        **settings,
    )
    trainer = SupportReplayGRPOTrainer(
        sys.argv[1], checksum_reward, args, train_dataset=sums(), rollout_func=rollout_func
    )
    trainer.train()
    print("@log " + json.dumps(trainer.state.log_history))
"""


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory):
    """A tiny Qwen3-MoE with a dense layer, and more vocabulary rows than the tokenizer has words."""
    path = tmp_path_factory.mktemp("moe")
    save_model(qwen3_moe_config(), path)
    character_tokenizer().save_pretrained(path)
    return path


@pytest.mark.needs("vllm")
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"top_k": 20, "top_p": 0.9}, id="truncated"),
        pytest.param({}, id="untruncated", marks=pytest.mark.slow),
        pytest.param({"top_k": 20, "cut": "observations behind the cut"}, id="turns that are cut"),
    ],
)
def test_ten_steps_with_routes_and_supports_replayed(moe_path, tmp_path, sampling):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAIN), str(moe_path), str(tmp_path), json.dumps(sampling)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(),
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("@log "))
    logs = [log for log in json.loads(line.removeprefix("@log ")) if "routes/agreement" in log]
    assert len(logs) == 10
    for log in logs:
        assert log["support/logprob_gap_max"] <= 1e-4
        assert abs(log["sampling/importance_sampling_ratio_raw/mean"] - 1) <= 1e-3
        assert log["sampling/outside_10pct"] == 0
        assert log["routes/uncaptured"] == 4  # the last token of each of the 4 completions, which no router saw
        assert log["routes/agreement"] > 0.99  # rounding may tip a router now and then; replay does not mind
