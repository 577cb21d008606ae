"""What marks a trace as one of images, video or audio, and what does not."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import Gemma3Config, LlamaConfig, Qwen2_5_VLConfig, Qwen3Config

from tests.traces.test_columns import ORIGIN, good
from trl_support_replay.traces.columns import Trace, TraceSchemaError, table_to_traces, traces_to_table
from trl_support_replay.traces.multimodal import (
    MultimodalTraceError,
    check_no_placeholders,
    check_text_row,
    placeholder_ids,
)


def message(*content):
    return {"prompt": [{"role": "system", "content": []}, {"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"image": object()}, "column 'image'"),
        ({"images": [1]}, "column 'images'"),
        (message({"type": "text", "text": "a"}, {"type": "image"}), "type 'image'"),
        (message({"type": "image_url", "image_url": "x"}), "type 'image_url'"),
        (message({"type": "video"}), "type 'video'"),
        (message({"type": "input_audio"}), "type 'input_audio'"),
        (message({"text": "a", "image": "x.png"}), "type 'image'"),
    ],
)
def test_rows_of_more_than_text_are_refused_both_ways(row, named):
    with pytest.raises(MultimodalTraceError, match=f"here.* {named}"):
        check_text_row(row, "here")
    trace = Trace(*good(), extra=row)
    with pytest.raises(MultimodalTraceError, match=f"Row 1.* {named}"):
        traces_to_table([replace(trace, extra=dict.fromkeys(row)), trace], **ORIGIN)
    if row.get("image") is None:
        table = traces_to_table([replace(trace, extra={})], **ORIGIN)
        for name, value in row.items():
            table = table.append_column(name, [[value]])
        with pytest.raises(MultimodalTraceError, match=f"Row 0.* {named}"):
            table_to_traces(table)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"image": None, "images": []},
        {"prompt": "an image"},
        message({"type": "text", "text": "image", "image": None}),  # how Arrow fills a struct
        {"prompt": [{"role": "assistant", "content": None, "tool_calls": [{"image": "x"}]}]},
    ],
)
def test_rows_of_text_pass(row):
    check_text_row(row, "here")
    assert len(table_to_traces(traces_to_table([Trace(*good(), extra=row)], **ORIGIN))) == 1


def test_a_column_that_no_type_holds_is_named():
    mixed = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(TraceSchemaError, match="The column 'prompt' mixes values that no one type holds"):
        traces_to_table([Trace(*good(), extra={"prompt": mixed})], **ORIGIN)


def test_ids_are_found_where_nobody_sampled_them():
    config = Qwen2_5_VLConfig(image_token_id=9, video_token_id=8, vision_start_token_id=6, vision_end_token_id=5)
    assert {9: "image_token_id", 8: "video_token_id", 6: "vision_start_token_id"}.items() <= (
        placeholder_ids(config).items()
    )
    trace = Trace(*good())  # completion 4, 9, 7, of which 9 is an observation
    with pytest.raises(MultimodalTraceError, match="Row 0: its observations hold 1 times the id 9, the image_token_id"):
        check_no_placeholders([trace], config)
    config.image_token_id = 7
    check_no_placeholders([trace], config)
    with pytest.raises(MultimodalTraceError, match="Row 1: its prompt hold 2 times the id 7"):
        check_no_placeholders([trace, replace(trace, prompt_ids=np.array([7, 7, 1], np.int32))], config)


def test_models_of_text_have_no_such_ids():
    assert placeholder_ids(LlamaConfig()) == placeholder_ids(Qwen3Config()) == {}
    assert Gemma3Config().image_token_id in placeholder_ids(Gemma3Config())
