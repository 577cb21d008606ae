"""A long run with everything on takes no more memory at its end than near its beginning."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from transformers import TrainerCallback

STEPS, SETTLED, WINDOW = 300, 60, 40


class Memory(TrainerCallback):
    """Resident memory of this process after each step, in MiB."""

    def __init__(self):
        self.mib = []

    def on_step_end(self, args, state, control, **kwargs):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.mib.append(pages * 4096 / 2**20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_300_steps(build, vllm, tiny_llama_path, tmp_path):
    memory = Memory()
    trainer = build(
        tiny_llama_path,
        use_vllm=True,
        top_p=0.95,
        min_p=0.01,
        generation_kwargs={"min_tokens": 2},
        beta=0.04,
        num_iterations=2,
        support_growth=True,
        save_traces=str(tmp_path / "traces"),
        log_completions=False,
        learning_rate=1e-5,
        max_steps=STEPS,
        max_completion_length=32,
        callbacks=[memory],
    )
    trainer.train()
    logged = [line for line in trainer.state.log_history if "support/logprob_gap_max" in line]
    assert len(memory.mib) == STEPS and len(logged) >= STEPS / 2
    assert max(line["support/logprob_gap_max"] for line in logged) <= 1e-4
    assert len(list((tmp_path / "traces").glob("*.parquet"))) == STEPS / 2
    early = statistics.median(memory.mib[SETTLED : SETTLED + WINDOW])
    late = statistics.median(memory.mib[-WINDOW:])
    print(f"resident memory: {early:.0f} MiB near the beginning, {late:.0f} MiB at the end")
    assert late < 1.03 * early
