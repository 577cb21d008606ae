"""Traces that transformers' `generate` really sampled, from tiny models, whole or with one fault."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trl_support_replay.analysis.audit import AuditTraces
from trl_support_replay.engines.transformers_generate import ScoresRecorder, recording
from trl_support_replay.rollouts.recorder import SupportRecorder
from trl_support_replay.routing import RouterReplay
from trl_support_replay.traces.columns import Trace


def sample(model, *, temperature=1.0, said=None, top_p=0.9, routes=False, num=12, tokens=24, seed=0, **generate):
    """Traces of `num` completions; `said` is the temperature that they claim, where it is not the true one."""
    torch.manual_seed(seed)
    prompts = torch.randint(3, 90, (num, 6))
    scores = ScoresRecorder()
    replay = RouterReplay(model) if routes else None
    with recording(model, scores):
        if replay is None:
            output = run(model, prompts, temperature, top_p, tokens, **generate)
        else:
            with replay.record() as routing:
                output = run(model, prompts, temperature, top_p, tokens, **generate)
    completions = [completion(row) for row in output[:, prompts.shape[1] :].tolist()]
    recorder = SupportRecorder()
    rows = scores.collect(completions)
    found = [None] * num
    if replay is not None:
        lengths = [prompts.shape[1] + len(c) for c in completions]
        found = routing.samples([0] * num, lengths, prompts.shape[1] + scores.num_steps)
    traces = [
        Trace(
            prompts[b].numpy().astype(np.int32),
            np.array(ids, np.int32),
            np.ones(len(ids), bool),
            np.array(values, np.float32),
            supports,
            found[b],
            {"step": b // 4},
        )
        for b, (ids, (values, supports)) in enumerate(zip(completions, rows, strict=True))
    ]
    assert recorder.repaired == 0
    return AuditTraces(traces, said or temperature, np.array([b // 4 for b in range(num)]), num_saved=num)


def run(model, prompts, temperature, top_p, tokens, **generate):
    with torch.no_grad():
        return model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            max_new_tokens=tokens,
            **generate,
        )


def completion(ids):
    return ids[: ids.index(2) + 1] if 2 in ids else ids


def edited(source, edit):
    """The same traces, each passed through `edit`."""
    return replace(source, traces=[edit(trace) for trace in source.traces])


@pytest.fixture(scope="session")
def dense(tiny_model_path):
    return AutoModelForCausalLM.from_pretrained(tiny_model_path).eval()


@pytest.fixture(scope="session")
def moe(moe_path):
    return AutoModelForCausalLM.from_pretrained(moe_path).eval()


@pytest.fixture
def moved(dense):
    """The dense model after some training."""
    model = copy.deepcopy(dense)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    return model
