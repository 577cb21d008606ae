"""Traces saved while training, and training on saved traces."""

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer
from trl_support_replay.rollouts.offline import OfflineTraces
from trl_support_replay.traces.columns import TraceSchemaError, table_to_traces
from trl_support_replay.traces.shards import ShardFolder

from .conftest import checksum_reward, sums
from .test_multi_turn import rollout

HF = {"use_vllm": False, "top_p": 0.9, "max_completion_length": 10}


def load(folder):
    return datasets.Dataset.from_parquet([str(p) for p in ShardFolder(folder).shards()])


@pytest.fixture
def saved(build, tiny_model_path, tmp_path):
    folder = tmp_path / "traces"
    settings = HF | {"per_device_train_batch_size": 8, "max_steps": 3}
    trainer = build(tiny_model_path, **settings, save_traces=str(folder), output_dir=str(tmp_path / "first"))
    trainer.train()
    return folder


def test_a_shard_a_generation_batch(saved, tiny_model_path):
    names = [p.name for p in ShardFolder(saved).shards()]
    assert names == [f"traces-{step:08d}-000-00000.parquet" for step in range(3)]
    dataset = load(saved)
    assert len(dataset) == 24
    traces = table_to_traces(dataset.with_format("arrow")[:])
    for i, trace in enumerate(traces):
        trace.check(f"row {i}", vocab_size=99)
        assert trace.extra["prompt"][0]["role"] == "user" and trace.extra["step"] == i // 8
    row = dataset[0]
    assert row["model"] == Path(tiny_model_path).name and row["engine"]["name"] == "transformers"
    assert row["sampling"] == {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 3}
    assert len(set(dataset["reward"])) > 3


def test_several_batches_of_one_step_and_observations(build, tiny_model_path, tmp_path):
    folder = tmp_path / "traces"
    settings = HF | {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "rollout_func": rollout()}
    build(tiny_model_path, **settings, save_traces=str(folder)).train()
    assert [p.name[7:19] for p in ShardFolder(folder).shards()] == [f"{s:08d}-{b:03d}" for s in (0, 1) for b in (0, 1)]
    traces = table_to_traces(load(folder).with_format("arrow")[:])
    assert all((~t.loss_mask).any() and np.isnan(t.sampling_logprobs[~t.loss_mask]).all() for t in traces)


def test_resuming_replaces_what_it_makes_anew(build, tiny_model_path, tmp_path):
    folder = tmp_path / "traces"
    settings = HF | {"save_strategy": "steps", "save_steps": 2, "save_traces": str(folder)}
    first = build(tiny_model_path, **settings | {"max_steps": 3}, output_dir=str(tmp_path / "run"))
    first.train()
    kept = [p.read_bytes() for p in ShardFolder(folder).shards()]
    (folder / ".traces-00000009-000-00000.parquet.77.partial").write_bytes(b"half")
    resumed = build(tiny_model_path, **settings | {"max_steps": 4}, output_dir=str(tmp_path / "run"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    shards = ShardFolder(folder).shards()
    assert [p.name[7:15] for p in shards] == [f"{s:08d}" for s in range(4)]
    assert [p.read_bytes() for p in shards[:2]] == kept[:2]
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("change", [{"output_dir": "other"}, {"top_p": 0.8}, {"offline": True}])
def test_traces_of_another_run_are_not_replaced(build, tiny_model_path, tmp_path, saved, change):
    kept = {p: p.read_bytes() for p in ShardFolder(saved).shards()}
    offline = {"train_dataset": load(saved), "reward_funcs": None} if change.pop("offline", False) else {}
    settings = HF | {"save_traces": str(saved), "output_dir": str(tmp_path / "first")} | change
    with pytest.raises(ValueError, match="holds a training run with .* Set save_traces to another folder"):
        build(tiny_model_path, **settings, **offline).train()
    assert {p: p.read_bytes() for p in ShardFolder(saved).shards()} == kept


def test_the_same_run_started_again_sets_its_traces_aside(build, tiny_model_path, tmp_path, saved):
    kept = [p.read_bytes() for p in ShardFolder(saved).shards()]
    for number in (1, 2):
        build(tiny_model_path, **HF, save_traces=str(saved), output_dir=str(tmp_path / "first"), max_steps=1).train()
        assert len(ShardFolder(saved).shards()) == 1
        assert len(ShardFolder(saved / f"earlier-{number}").shards()) == (3 if number == 1 else 1)
    assert [p.read_bytes() for p in ShardFolder(saved / "earlier-1").shards()] == kept


def test_a_completion_that_nothing_could_score_has_no_reward(build, tiny_model_path, tmp_path):
    rewards = [None, 1.0, 3.0, None]
    folder = tmp_path / "traces"
    build(tiny_model_path, **HF, save_traces=str(folder), reward_funcs=lambda **_: rewards, max_steps=1).train()
    np.testing.assert_equal(load(folder).with_format("numpy")["reward"][:], [np.nan, 1.0, 3.0, np.nan])


@pytest.mark.parametrize("name", ["reward", "step"])
def test_columns_of_training_are_not_replaced(build, tiny_model_path, tmp_path, name):
    data = sums().add_column(name, [0] * 32)
    with pytest.raises(TraceSchemaError, match=rf"columns \['{name}'\], which saved traces have"):
        build(tiny_model_path, **HF, save_traces=str(tmp_path / "traces"), train_dataset=data)


def test_an_unwritable_folder_is_refused_at_construction(build, tiny_model_path, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError):
        build(tiny_model_path, **HF, save_traces=str(blocked / "traces"))


def test_training_on_saved_traces_equals_training_while_sampling(build, tiny_model_path, tmp_path, saved):
    """One step on the first batch's traces moves the weights as the run that made them did."""
    live = build(
        tiny_model_path, **HF | {"per_device_train_batch_size": 8, "max_steps": 1}, optim="sgd", max_grad_norm=0
    )
    live.train()
    batch = datasets.Dataset.from_parquet(str(ShardFolder(saved).shards()[0]))
    offline = build(
        tiny_model_path,
        **HF | {"per_device_train_batch_size": 8, "max_steps": 1},
        optim="sgd",
        max_grad_norm=0,
        train_dataset=batch,
        reward_funcs=None,
        shuffle_dataset=False,
    )
    offline.train()
    log = offline.state.log_history[0]
    assert log["support/logprob_gap_max"] <= 1e-4
    assert log["reward"] == pytest.approx(live.state.log_history[0]["reward"])
    fresh = type(live.model).from_pretrained(tiny_model_path)
    moved = 0.0
    for (name, a), b, c in zip(
        live.model.named_parameters(), offline.model.parameters(), fresh.parameters(), strict=True
    ):
        torch.testing.assert_close(b, a, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        moved = max(moved, (a - c).abs().max().item())
    assert moved > 1e-6


@pytest.mark.filterwarnings("error:You are using 'rollout_func'")
def test_no_warning_speaks_of_what_the_user_did_not_set(build, tiny_model_path, saved):
    build(tiny_model_path, **HF, train_dataset=load(saved), reward_funcs=None)


def test_an_evaluation_samples_its_own_completions(build, tiny_model_path, saved):
    prompts = [[{"role": "user", "content": f"Say {word}."}] for word in ("yes", "no", "so", "and")]
    seen = []

    def reward(prompts, completions, **_):
        seen.append([p[0]["content"] for p in prompts])
        return [float(len(c[0]["content"]) % 3) for c in completions]

    trainer = build(
        tiny_model_path,
        **HF,
        train_dataset=load(saved),
        eval_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        reward_funcs=reward,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    evaluated = {p for batch in seen for p in batch if p.startswith("Say ")}
    assert evaluated == {f"Say {word}." for word in ("yes", "no", "so", "and")}
    logs = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(logs) == 3 and all(log["eval_completions/max_length"] <= 10 for log in logs)


def test_the_reward_column_does_not_speak_for_an_evaluation(build, tiny_model_path, saved):
    with pytest.raises(TraceSchemaError, match="eval_dataset with saved traces"):
        build(tiny_model_path, **HF, train_dataset=load(saved), eval_dataset=load(saved), reward_funcs=None)


def test_nothing_is_read_or_written_where_nothing_is_replayed(build, moe_path, tmp_path):
    stock = {"use_vllm": False, "max_completion_length": 10}
    with pytest.raises(TraceSchemaError, match="save_traces='x' keeps what is replayed, and nothing is"):
        build(moe_path, **stock, save_traces="x")
    folder = tmp_path / "traces"
    routed = build(
        moe_path, **stock, routed_experts_replay=True, save_traces=str(folder), output_dir=str(tmp_path / "a")
    )
    routed.train()
    with pytest.raises(TraceSchemaError, match="drawn from the whole vocabulary, and routed_experts_replay=False"):
        build(moe_path, **stock, train_dataset=load(folder), reward_funcs=None)
    with pytest.raises(TraceSchemaError, match="drawn from the whole vocabulary, and the configuration has top_p=0.9"):
        build(moe_path, **stock, top_p=0.9, train_dataset=load(folder), reward_funcs=None)
    cut = build(moe_path, **stock, top_p=0.9, save_traces=str(tmp_path / "cut"), output_dir=str(tmp_path / "b"))
    cut.train()
    both = [row for name in ("traces", "cut") for row in load(tmp_path / name).select_columns(BASIC).to_list()]
    with pytest.raises(TraceSchemaError, match="Tokens of row 8 were drawn from recorded supports, and those of row 0"):
        build(
            moe_path, **stock, top_p=0.9, train_dataset=datasets.Dataset.from_list(both), reward_funcs=checksum_reward
        )


BASIC = ["prompt_ids", "completion_ids", "loss_mask", "sampling_logprobs", "support_ids", "sampling"]


@pytest.fixture(scope="module")
def sampled_differently(tiny_model_path, tmp_path_factory):
    """Four completions of a prompt for each way of sampling, all at temperature 1."""
    folder = tmp_path_factory.mktemp("different")
    different = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"generation_kwargs": {"suppress_tokens": [40, 50]}}]
    for i, settings in enumerate(different):
        args = SupportReplayGRPOConfig(
            output_dir=str(folder / f"run{i}"), save_traces=str(folder / str(i)), use_cpu=True, bf16=False, max_steps=1,
            report_to=[], disable_tqdm=True, per_device_train_batch_size=4, num_generations=4, max_completion_length=10,
            save_strategy="no", **settings,
        )  # fmt: skip
        data = sums().select([i])
        SupportReplayGRPOTrainer(tiny_model_path, checksum_reward, args, train_dataset=data).train()
    return datasets.concatenate_datasets([load(folder / str(i)) for i in range(len(different))])


def test_traces_that_were_sampled_differently_are_trained_on_as_one(
    build, tiny_model_path, sampled_differently, tmp_path, record_property
):
    found = {(row["top_p"], row["top_k"], row["min_p"]) for row in sampled_differently["sampling"]}
    assert found == {(0.9, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.1), (1.0, 0, 0.0)}
    trainer = build(
        tiny_model_path, **HF | {"top_p": 0.5, "per_device_train_batch_size": 16, "max_steps": 1},
        train_dataset=sampled_differently, reward_funcs=None, save_traces=str(tmp_path / "again"),
    )  # fmt: skip
    trainer.train()
    gap = trainer.state.log_history[0]["support/logprob_gap_max"]
    record_property("gap, saved traces, several top_p, top_k and min_p", f"{gap:.1e}")
    assert gap <= 1e-4
    # What cut the tokens of a row is not the configuration's; its temperature is.
    for row in load(tmp_path / "again")["sampling"]:
        assert row == {"temperature": 1.0, "top_p": None, "top_k": None, "min_p": None, "seed": 3}


def test_traces_of_several_temperatures_are_refused(build, tiny_model_path, sampled_differently):
    rows = sampled_differently.select_columns(BASIC).to_list()
    rows[5]["sampling"]["temperature"] = 0.7
    with pytest.raises(TraceSchemaError, match=r"temperature=0.7, temperature=1, .* take those of one .* == 0.7\)"):
        build(
            tiny_model_path, **HF, train_dataset=datasets.Dataset.from_list(rows), reward_funcs=checksum_reward
        )  # fmt: skip


def test_recorded_supports_are_not_scored_over_the_vocabulary(build, tiny_model_path, saved):
    stock = {"use_vllm": False, "max_completion_length": 10}
    with pytest.raises(TraceSchemaError, match="drawn from recorded supports, and the configuration cuts no tokens"):
        build(tiny_model_path, **stock, train_dataset=load(saved), reward_funcs=None)


def test_the_parts_of_one_policy_score_the_same_completions(saved, tiny_model_path):
    args = SimpleNamespace(use_vllm=False, temperature=1.0, top_p=0.9, top_k=0, min_p=None, num_generations=4)
    offline = OfflineTraces(load(saved), args, AutoConfig.from_pretrained(tiny_model_path))
    policy = SimpleNamespace(tp_size=2)

    def completions(process):
        offline.choose([0, 0])
        trainer = SimpleNamespace(accelerator=SimpleNamespace(process_index=process), model=policy)
        return offline(["", ""], trainer)["completion_ids"]

    found = [completions(process) for process in range(4)]
    assert found[0] == found[1] and found[2] == found[3]
    assert found[0] + found[2] == [t.completion_ids.tolist() for t in offline.groups[0]]


def test_the_old_policy_is_the_one_that_sampled(build, tiny_model_path, saved):
    trainer = build(tiny_model_path, **HF, train_dataset=load(saved), reward_funcs=None, max_steps=4, num_iterations=2)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.1)
    seen = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: (seen.append(inputs), compute(model, inputs))[1]
    trainer.train()
    for inputs in seen:
        torch.testing.assert_close(inputs["old_per_token_logps"], inputs["sampling_per_token_logps"])
    assert trainer.state.log_history[0]["support/logprob_gap_max"] > 1e-2  # told, and not an error


def test_rewards_may_come_from_functions_and_columns(build, tiny_model_path, saved):
    seen = []

    def reward(completions, step, **_):
        seen.extend(step)
        return [float(len(c[0]["content"]) % 3) for c in completions]

    build(
        tiny_model_path, **HF, train_dataset=load(saved), reward_funcs=reward, num_train_epochs=2, max_steps=-1
    ).train()
    assert len(seen) == 2 * 24 and set(seen) == {0, 1, 2}


def test_routes_are_trained_through_offline(build, moe_path, tmp_path):
    folder = tmp_path / "traces"
    settings = HF | {"routed_experts_replay": True}
    build(moe_path, **settings, save_traces=str(folder), output_dir=str(tmp_path / "first")).train()
    trainer = build(moe_path, **settings, train_dataset=load(folder), reward_funcs=None)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["routes/agreement"] > 0.99 and log["support/logprob_gap_max"] <= 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "sampled with temperature=1, and the configuration has temperature=0.7"),
        ({"num_generations": 8, "per_device_train_batch_size": 8}, "num_generations=8, but no prompt .* than 4"),
    ],
)
def test_traces_that_do_not_fit_are_refused(build, tiny_model_path, saved, settings, message):
    with pytest.raises(TraceSchemaError, match=message):
        build(tiny_model_path, **HF | settings, train_dataset=load(saved), reward_funcs=None)


def test_an_engine_is_not_started_for_saved_traces(build, tiny_model_path, saved):
    with pytest.raises(TraceSchemaError, match="use_vllm=True with a traces dataset"):
        build(tiny_model_path, **HF | {"use_vllm": True, "top_k": 5}, train_dataset=load(saved))


def test_streams_are_refused(build, tiny_model_path, saved):
    stream = load(saved).to_iterable_dataset()
    with pytest.raises(TraceSchemaError, match="streaming=False"):
        build(tiny_model_path, **HF, train_dataset=stream, max_steps=1)


KILLED = """
    import sys, datasets
    sys.path.insert(0, {root!r})
    from tests.trainers.conftest import checksum_reward, sums
    from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer
    args = SupportReplayGRPOConfig(
        output_dir={output!r}, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=6, top_p=0.9,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=8, save_strategy="steps", save_steps=1,
        save_traces={folder!r}, seed=3, logging_steps=1,
    )
    trainer = SupportReplayGRPOTrainer({model!r}, checksum_reward, args, train_dataset=sums())
    from pathlib import Path
    found = sorted(Path({output!r}).glob("checkpoint-*/trainer_state.json"))
    whole = [p.parent for p in found if (p.parent / "rng_state.pth").exists()]
    newest = max(whole, key=lambda p: int(p.name.split("-")[1])) if whole else None
    print("READY", flush=True)
    # Transformers would train one more step if it resumed a run that is over.
    if newest is None or newest.name != "checkpoint-6":
        trainer.train(resume_from_checkpoint=None if newest is None else str(newest))
"""


@pytest.mark.slow
def test_killed_at_random_moments_every_shard_is_whole(tiny_model_path, tmp_path):
    """Twenty kills at random moments, each resumed: in the end the traces are those of an uninterrupted run."""
    root = str(Path(__file__).parents[2])

    def script(name):
        code = KILLED.format(
            root=root, output=str(tmp_path / name), folder=str(tmp_path / f"{name}-traces"), model=tiny_model_path
        )
        return [sys.executable, "-c", textwrap.dedent(code)]

    rng = np.random.default_rng(0)
    kills, runs = 0, 1
    errors = tmp_path / "stderr.txt"
    while kills < 20:
        with open(errors, "w") as stderr:
            process = subprocess.Popen(script(f"run{runs}"), stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert any(line.startswith("READY") for line in process.stdout), errors.read_text()[-3000:]
        try:
            assert process.wait(timeout=rng.uniform(0.0, 4.0)) == 0, errors.read_text()[-3000:]
            runs += 1  # over before it was killed: begin another one
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        process.communicate()
        for path in ShardFolder(tmp_path / f"run{runs}-traces").shards():
            for trace in table_to_traces(pq.read_table(path)):
                trace.check(path.name, vocab_size=99)
    subprocess.run(script(f"run{runs}"), check=True, capture_output=True)
    subprocess.run(script("whole"), check=True, capture_output=True)
    whole = ShardFolder(tmp_path / "whole-traces").shards()
    assert len(whole) == 6
    for number in range(1, runs + 1):
        killed = ShardFolder(tmp_path / f"run{number}-traces").shards()
        assert [p.name for p in killed] == [p.name for p in whole]
        for a, b in zip(killed, whole, strict=True):
            first, second = table_to_traces(pq.read_table(a)), table_to_traces(pq.read_table(b))
            for got, want in zip(first, second, strict=True):
                np.testing.assert_array_equal(got.prompt_ids, want.prompt_ids)
                np.testing.assert_array_equal(got.completion_ids, want.completion_ids)
                assert got.supports == want.supports and got.extra == want.extra
                np.testing.assert_allclose(got.sampling_logprobs, want.sampling_logprobs, atol=1e-5)
