"""Training on traces that are not what a run saved, and saving columns that are more than plain values."""

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig

from trl_support_replay import (
    SupportReplayGRPOConfig,
    SupportReplayGRPOTrainer,
    SupportReplayRLOOConfig,
    SupportReplayRLOOTrainer,
)
from trl_support_replay.traces.columns import TraceSchemaError
from trl_support_replay.traces.multimodal import MultimodalTraceError
from trl_support_replay.traces.shards import ShardFolder

from .conftest import checksum_reward, sums
from .test_saved_traces import HF, load


@pytest.fixture(scope="module")
def saved(tiny_model_path, tmp_path_factory):
    """Three batches of two prompts, four completions each."""
    folder = tmp_path_factory.mktemp("saved") / "traces"
    settings = HF | {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 3, "save_strategy": "no"}
    settings |= {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_traces": str(folder)}
    args = SupportReplayGRPOConfig(output_dir=str(folder.parent / "run"), **settings)
    SupportReplayGRPOTrainer(tiny_model_path, checksum_reward, args, train_dataset=sums()).train()
    return folder


def rows_changed(edit):
    def change(dataset):
        rows = dataset.to_list()
        edit(rows)
        return datasets.Dataset.from_list(rows)

    return change


def with_prompts(dataset):
    return datasets.concatenate_datasets([dataset, sums(4)])


def without(name):
    return lambda dataset: dataset.remove_columns(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_prompts, r"Row 24 has no prompt_ids \(4 of 28 rows have none\). Prompts and traces do not mix; drop"),
        (
            rows_changed(lambda rows: [row["sampling"].pop("min_p") for row in rows]),
            r"`sampling` lacks the fields \['min_p'\].* \(min_p=0 is off\)",
        ),
        (rows_changed(lambda rows: rows[3].update(sampling=None)), "Row 3 has no `sampling`, which was saved with it"),
        (rows_changed(lambda rows: rows[3]["sampling"].update(top_k=3)), "Row 3 is not what was saved"),
        (
            lambda d: rows_changed(lambda rows: rows[3].update(sampling=None))(without("trace_digest")(d)),
            "row 3: sampling.temperature is None",
        ),
        (without("sampling_logprobs"), r"of saved traces and lacks \['sampling_logprobs'\].* dataset.remove_columns"),
        (without(["support_ids", "completion_ids"]), r"lacks \['completion_ids', 'support_ids'\]"),
        (without("sampling"), "has no `sampling` column"),
    ],
)
def test_traces_that_are_not_whole_are_named(build, tiny_model_path, saved, change, message):
    with pytest.raises(TraceSchemaError, match=message):
        build(tiny_model_path, **HF, train_dataset=change(load(saved)), reward_funcs=None)


def test_rloo_takes_no_part_of_traces_for_prompts(build, tiny_model_path, saved):
    settings = {"use_vllm": False, "trainer_cls": SupportReplayRLOOTrainer, "config_cls": SupportReplayRLOOConfig}
    with pytest.raises(TraceSchemaError, match=r"lacks \['loss_mask'\]"):
        build(tiny_model_path, **settings, train_dataset=load(saved).remove_columns("loss_mask"))


def test_a_null_that_switches_nothing_is_off(build, tiny_model_path, saved):
    def edit(rows):
        for row in rows:
            row["sampling"] |= {"top_k": None, "min_p": None}

    dataset = rows_changed(edit)(load(saved).remove_columns("trace_digest"))
    assert len(build(tiny_model_path, **HF, train_dataset=dataset, reward_funcs=None)._offline.groups) == 6


FEATURES = {
    "level": datasets.ClassLabel(names=["easy", "hard"]),
    "meta": datasets.Json(),
    "tests": datasets.List({"input": datasets.Value("string"), "output": datasets.Value("string")}),
}


def labelled():
    prompts = sums(8)
    columns = {
        "prompt": prompts["prompt"],
        "level": [i % 2 for i in range(8)],
        "meta": [{"id": i, "of": [i, "x"]} for i in range(8)],
        "tests": [[{"input": str(i), "output": None}] * (i % 3) for i in range(8)],
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(prompts.features | FEATURES))


def test_columns_reach_rewards_offline_as_they_did_online(build, tiny_model_path, tmp_path):
    seen = {}

    def reward(prompts, completions, level, meta, tests, **_):
        for prompt, *values in zip(prompts, level, meta, tests, strict=True):
            seen.setdefault(prompt[0]["content"], set()).add(repr(values))
        return [float(len(c[0]["content"]) % 3) for c in completions]

    folder = tmp_path / "traces"
    build(tiny_model_path, **HF, train_dataset=labelled(), reward_funcs=reward, save_traces=str(folder)).train()
    online, seen = seen, {}
    traces = load(folder)
    assert {name: traces.features[name] for name in FEATURES} == FEATURES
    build(
        tiny_model_path,
        **HF | {"output_dir": str(tmp_path / "offline")},
        train_dataset=traces,
        reward_funcs=reward,
        num_train_epochs=1,
        max_steps=-1,
    ).train()
    assert seen == online and len(online) == 2


def stream(rows):
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def test_a_stream_whose_columns_begin_with_nulls_is_read_back(build, tiny_model_path, tmp_path):
    """The first batches know neither the type of `answer` nor that `hint` is a struct with a number."""
    late = {"answer": "four", "hint": {"n": 1.5}, "count": 2.5}
    early = {"answer": None, "hint": {"n": None}, "count": 2}
    rows = [{"prompt": p, **(early if i < 2 else late)} for i, p in enumerate(sums(8)["prompt"])]
    folder = tmp_path / "traces"
    settings = HF | {"max_steps": 4, "shuffle_dataset": False}
    build(tiny_model_path, **settings, train_dataset=stream(rows), save_traces=str(folder)).train()
    shards = ShardFolder(folder).shards()
    kinds = {tuple(str(pq.read_schema(path).field(name).type) for name in late) for path in shards}
    assert len(shards) == 4 and kinds == {("string", "struct<n: double>", "double")}
    traces = load(folder)
    assert [traces[i]["answer"] for i in (0, 4, 8, 12)] == [None, None, "four", "four"]
    offline = build(tiny_model_path, **HF, train_dataset=traces, reward_funcs=None)
    assert [t.extra["hint"] for g in offline._offline.groups for t in g][-1] == {"n": 1.5}


def test_a_stream_that_mixes_types_is_named(build, tiny_model_path, tmp_path):
    rows = [{"prompt": p, "answer": [4, "four"][i // 2]} for i, p in enumerate(sums(4)["prompt"])]
    settings = HF | {"max_steps": 4, "shuffle_dataset": False, "save_traces": str(tmp_path / "traces")}
    trainer = build(tiny_model_path, **settings, train_dataset=stream(rows))
    with pytest.raises(TraceSchemaError, match="the column 'answer' holds int64 in earlier batches and string in this"):
        trainer.train()


# ------------------------------------------------------------------------------------------------------------- images


def picture(where):
    """Rows as TRL takes them: images in a column, or in a message."""
    rows = [{"prompt": p} for p in sums(8)["prompt"]]
    for row in rows:
        if where == "message":
            row["prompt"] = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
        else:
            row[where] = "img" if where == "image" else ["img"]
    return rows


@pytest.mark.parametrize("column", ["image", "images"])
def test_saving_refuses_columns_of_images(build, tiny_model_path, tmp_path, column):
    data = datasets.Dataset.from_list(picture(column))
    with pytest.raises(MultimodalTraceError, match=rf"save_traces=.* has the columns \['{column}'\], and traces carry"):
        build(tiny_model_path, **HF, train_dataset=data, save_traces=str(tmp_path / "traces"))


def test_saving_refuses_prompts_with_the_ids_of_images(build, tiny_model_path, tmp_path):
    """Whatever put them there: a rollout's own tokenization, or a processor."""
    trainer = build(tiny_model_path, **HF, save_traces=str(tmp_path / "traces"))
    trainer.model.config.image_token_id = trainer.processing_class.convert_tokens_to_ids("W")  # of "What"
    with pytest.raises(MultimodalTraceError, match="Completion 0: its prompt hold 1 times the id .* image_token_id of"):
        trainer.train()
    assert not ShardFolder(tmp_path / "traces").shards()


@pytest.mark.parametrize("where", ["image", "images", "message"])
def test_training_refuses_saved_images(build, tiny_model_path, saved, where):
    traces = load(saved).remove_columns("prompt")
    pictures = (picture(where) * 3)[: len(traces)]
    traces = datasets.concatenate_datasets([traces, datasets.Dataset.from_list(pictures)], axis=1)
    named = "its prompt has a part of type 'image'" if where == "message" else f"has a value in the column '{where}'"
    with pytest.raises(MultimodalTraceError, match=f"Row 0.* {named}"):
        build(tiny_model_path, **HF, train_dataset=traces, reward_funcs=None)


def test_training_refuses_prompts_with_the_ids_of_images(build, tiny_model_path, saved):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.config.image_token_id = int(load(saved)[0]["prompt_ids"][3])
    with pytest.raises(MultimodalTraceError, match="Row 0: its prompt hold .* the image_token_id of llama"):
        build(model, **HF, train_dataset=load(saved), reward_funcs=None)


def test_a_sampled_id_is_no_image(build, tiny_model_path, saved):
    from transformers import AutoModelForCausalLM

    traces = load(saved)
    prompts = set(np.concatenate([row["prompt_ids"] for row in traces]).tolist())
    sampled = [t for row in traces for t in row["completion_ids"] if t not in prompts]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    model.config.image_token_id = sampled[0]
    tokenizer = build(tiny_model_path, **HF).processing_class
    build(model, **HF, train_dataset=traces, reward_funcs=None, processing_class=tokenizer)
    assert not hasattr(AutoConfig.from_pretrained(tiny_model_path), "image_token_id")
