"""Tools, environments and custom rollouts: every sampled token of every turn keeps its support."""

import copy
import pickle

import numpy as np
import pytest
import trl.trainer.grpo_trainer as trl_grpo
from transformers import AutoTokenizer

from trl_support_replay.traces.support import SupportError, SupportRows

from .test_replay import assert_replayed

HF = {"use_vllm": False, "top_p": 0.9, "max_completion_length": 60}
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls') or [] %}{{ c['function']['name'] }} {{ c['function']['arguments'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def fail() -> str:
    """A tool that always fails."""
    raise RuntimeError("no such thing")


def long_answer() -> str:
    """A tool that says too much."""
    return "word " * 200


@pytest.fixture
def scripted(monkeypatch):
    """The model is too small to call tools, so its replies are read as calls: `scripted([...])`, one entry a reply."""

    def script(calls):
        turn = {"of": {}}

        def parse(tokenizer, ids, prefix=None, tools=None):
            key = tuple(prefix[:1]) + (len(turn["of"]),)
            turn["of"][key] = True
            call = calls[len(turn["of"]) % len(calls)]
            message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
            if call is not None:
                message["tool_calls"] = [{"type": "function", "function": {"name": call[0], "arguments": call[1]}}]
            return message

        monkeypatch.setattr(trl_grpo, "parse_response", parse)
        monkeypatch.setattr(trl_grpo, "add_response_schema", lambda processing_class: processing_class)

    return script


def tool_tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {}}}
    return tokenizer


def spy_batches(trainer):
    batches = []
    compute = trainer._compute_loss

    def spy(model, inputs):
        batches.append(inputs)
        return compute(model, inputs)

    trainer._compute_loss = spy
    return batches


def assert_observations_are_empty(batches):
    observations = 0
    for batch in batches:
        for b, sample in enumerate(batch["support_samples"]):
            mask = batch["tool_mask"][b, : len(sample.completion_ids)].numpy().astype(bool)
            np.testing.assert_array_equal(sample.loss_mask, mask)
            np.testing.assert_array_equal(sample.supports.sizes > 0, mask)
            observations += int((~mask).sum())
    assert observations > 0


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        pytest.param([("add", {"a": 1, "b": 2}), None, ("add", {"a": 4, "b": 5})], 2, id="several turns"),
        pytest.param([("fail", {}), None], 1, id="tools that fail"),
        pytest.param([("add", {"a": 1, "b": 2}), ("long_answer", {}), None], 1, id="results too long"),
        pytest.param([("add", {"a": 1, "b": 2})], 1, id="until the budget is spent"),
    ],
)
def test_tool_loop_through_vllm(build, vllm, tiny_llama_path, scripted, calls, steps):
    scripted(calls)
    trainer = build(
        tiny_llama_path,
        use_vllm=True,
        top_k=20,
        top_p=0.9,
        max_completion_length=56,
        tools=[add, fail, long_answer],
        processing_class=tool_tokenizer(tiny_llama_path),
        generation_kwargs={"max_tokens": 12},
        learning_rate=1e-5,
        max_steps=steps,
    )
    batches = spy_batches(trainer)
    trainer.train()
    assert_replayed(trainer, steps)
    assert_observations_are_empty(batches)


class Counter:
    def reset(self, **_):
        self.count = 0
        return "start"

    def increment(self) -> int:
        """Count one up."""
        self.count += 1
        return self.count

    def get_reward(self) -> float:
        return float(self.count % 2)


def test_environment(build, vllm, tiny_llama_path, scripted):
    scripted([("increment", {}), None, None])
    trainer = build(
        tiny_llama_path,
        use_vllm=True,
        top_k=20,
        max_completion_length=40,
        environment_factory=Counter,
        processing_class=tool_tokenizer(tiny_llama_path),
        generation_kwargs={"max_tokens": 10},
        learning_rate=1e-5,
        max_steps=1,
    )
    batches = spy_batches(trainer)
    trainer.train()
    assert_replayed(trainer, 1)
    assert_observations_are_empty(batches)


def rollout(edit=lambda output: output):
    """Two turns with an observation between them, through the trainer's own generation."""

    def run(prompts, trainer):
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        first, first_logps = trainer._generate_single_turn(prompt_ids, None, {}, trainer.num_generations)
        observation = trainer._tokenizer("42\n").input_ids
        history = [p + c + observation for p, c in zip(prompt_ids, first, strict=True)]
        second, second_logps = trainer._generate_single_turn(history, None, {}, trainer.num_generations)
        output = {
            "prompt_ids": prompt_ids,
            "completion_ids": [a + observation + b for a, b in zip(first, second, strict=True)],
            "logprobs": [a + [0.0] * len(observation) + b for a, b in zip(first_logps, second_logps, strict=True)],
            "env_mask": [
                [1] * len(a) + [0] * len(observation) + [1] * len(b) for a, b in zip(first, second, strict=True)
            ],
        }
        return edit(output, trainer) if edit.__code__.co_argcount == 2 else edit(output)

    return run


def supports_of(output, trainer):
    """The same rollout from an engine of one's own: plain log-probs, and the supports under their key."""
    table = trainer._recorder.table()
    output["support_ids"] = [
        table.take(trainer._recorder.row_indices(logps)).to_lists() for logps in output["logprobs"]
    ]
    output["logprobs"] = [[float(x) for x in logps] for logps in output["logprobs"]]
    return output


def arrays_of_numbers(output, trainer):
    output = supports_of(output, trainer)
    return output | {"logprobs": [np.array(values) for values in output["logprobs"]]}


@pytest.mark.parametrize(
    "edit",
    [lambda output: output, supports_of, arrays_of_numbers],
    ids=["traced log-probs", "support_ids", "arrays"],
)
def test_custom_rollout(build, tiny_model_path, edit):
    trainer = build(tiny_model_path, **HF | {"max_completion_length": 8}, rollout_func=rollout(edit))
    batches = spy_batches(trainer)
    trainer.train()
    assert_replayed(trainer, 2)
    assert_observations_are_empty(batches)


def test_support_ids_do_not_reach_the_rewards(build, tiny_model_path):
    seen = []

    def reward(completions, **kwargs):
        seen.append(set(kwargs))
        return [float(len(c[0]["content"]) % 3) for c in completions]

    trainer = build(
        tiny_model_path, **HF | {"max_completion_length": 8}, rollout_func=rollout(supports_of), reward_funcs=reward
    )
    trainer.train()
    assert seen and not any("support_ids" in names for names in seen)


def forget(output):
    output["logprobs"] = [[float(x) for x in logps] for logps in output["logprobs"]]
    return output


def retokenize(output, trainer):
    """Decode the history and tokenise it again, as chat loops do; here a character is read as another."""
    output["completion_ids"] = [[ids[0] ^ 1, *ids[1:]] for ids in output["completion_ids"]]
    return output


def none(output):
    output["logprobs"] = None
    return output


def none_for_one(output):
    output["logprobs"][2] = None
    return output


def none_with_supports(output, trainer):
    return none(supports_of(output, trainer))


def none_for_a_sampled_token(output, trainer):
    output = supports_of(output, trainer)
    output["logprobs"][1][0] = None
    return output


def of_an_earlier_batch():
    """Hands back the completions of its first call, as a rollout that keeps the best of them might."""
    kept = []

    def edit(output):
        kept.append(output)
        return kept[0]

    return edit


def nan_for_a_sampled_token(output, trainer):
    output = supports_of(output, trainer)
    output["logprobs"][1][0] = float("nan")
    return output


def nested_logprobs(output, trainer):
    output = supports_of(output, trainer)
    output["logprobs"][1] = [[value] for value in output["logprobs"][1]]
    return output


def no_row_for_a_token(output, trainer):
    output = supports_of(output, trainer)
    output["support_ids"][1][0] = None
    return output


def without_a_prompt(output, trainer):
    output = supports_of(output, trainer)
    output["prompt_ids"] = [*output["prompt_ids"][:3], []]
    return output


def short(output, trainer):
    output = supports_of(output, trainer)
    output["support_ids"][1].pop()
    return output


def on_observation(output, trainer):
    output = supports_of(output, trainer)
    rows, mask = output["support_ids"][0], output["env_mask"][0]
    rows[mask.index(0)] = [output["completion_ids"][0][mask.index(0)]]
    return output


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (forget, "completion 0 came back without supports, which top_p=0.9 asks for.*'support_ids'"),
        (retokenize, "was sampled as id .* and came back as .*re-tokenising"),
        (nested_logprobs, "completion 1 has log-probs that are not one number per token: "),
        (no_row_for_a_token, "completion 1: 'support_ids' needs one list of integer ids per token, not .*NoneType"),
        (without_a_prompt, "completion 3 has no prompt"),
        (short, "completion 1 has .* tokens and .* rows under 'support_ids'"),
        (on_observation, "is an observation, but its row is not empty"),
        (none, "^rollout_func returned 'logprobs': None. .* has to return them.*'support_ids'"),
        (none_for_one, "^rollout_func returned 'logprobs': None for completion 2. "),
        (none_with_supports, "^rollout_func returned 'logprobs': None. "),
        (none_for_a_sampled_token, "^completion 1: token 0 was sampled, and its log-prob is None. .*rollout_func"),
        (nan_for_a_sampled_token, "^completion 1: token 0 was sampled, and its log-prob is nan. .*rollout_func"),
        (of_an_earlier_batch(), "came back without supports, .*log-probs that the trainer's own generation returned"),
    ],
    ids=[
        "forgotten",
        "retokenised",
        "lists as log-probs",
        "no row for a token",
        "no prompt",
        "a row short",
        "row on an observation",
        "no log-probs",
        "no log-probs for one",
        "no log-probs beside supports",
        "no log-prob of a sampled token",
        "no number as log-prob of a sampled token",
        "log-probs of an earlier batch",
    ],
)
def test_rollouts_that_break_the_rules_are_refused(build, tiny_model_path, edit, message):
    trainer = build(tiny_model_path, **HF | {"max_completion_length": 8}, rollout_func=rollout(edit))
    with pytest.raises(SupportError, match=message):
        trainer.train()


def copied(output):
    output["logprobs"] = copy.deepcopy(output["logprobs"])
    return output


def sent_on(output):
    return pickle.loads(pickle.dumps(output))


def none_for_observations(output):
    for values, mask in zip(output["logprobs"], output["env_mask"], strict=True):
        values[:] = [x if sampled else None for x, sampled in zip(values, mask, strict=True)]
    return output


@pytest.mark.parametrize("edit", [copied, sent_on, none_for_observations])
def test_logprobs_may_be_copied_and_lack_observations(build, tiny_model_path, edit):
    trainer = build(tiny_model_path, **HF | {"max_completion_length": 8}, rollout_func=rollout(edit))
    trainer.train()
    assert_replayed(trainer, 2)


def test_support_rows_are_accepted_as_they_are(build, tiny_model_path):
    def edit(output, trainer):
        output = supports_of(output, trainer)
        output["support_ids"] = [SupportRows.from_ragged(rows) for rows in output["support_ids"]]
        return output

    trainer = build(tiny_model_path, **HF | {"max_completion_length": 8}, rollout_func=rollout(edit))
    trainer.train()
    assert_replayed(trainer, 2)
