"""What recipes name: the GSM8K map under TRL's own reward, and the calculator with its reward."""

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from trl.rewards import accuracy_reward

from recipes.tools import boxed_reward, calculate
from trl_support_replay.cli.grpo_inputs.datasets import choose_split, gsm8k, mapped

# In the form of openai/gsm8k.
ROW = {"question": "Two boxes hold 600 pens each. How many pens?", "answer": "600 * 2 = <<600*2=1200>>1200\n#### 1,200"}


def says(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.needs("math-verify")
def test_gsm8k_rows_suit_the_accuracy_reward():
    splits = DatasetDict(train=Dataset.from_list([ROW] * 3))
    rows = mapped(choose_split(splits, "train", "gsm8k", "--dataset_train_split"), gsm8k)
    assert rows.column_names == ["prompt", "solution"]
    assert "pens?" in rows[0]["prompt"][0]["content"] and "\\boxed{}" in rows[0]["prompt"][0]["content"]
    completions = [says(r"It is \boxed{1200}."), says(r"It is \boxed{1,200}."), says(r"It is \boxed{600}.")]
    assert accuracy_reward(completions, rows["solution"]) == [1.0, 1.0, 0.0]


@given(st.integers(-(10**9), 10**9))
def test_any_gsm8k_answer_becomes_its_number(value):
    assert gsm8k({"question": "?", "answer": f"so\n#### {value:,}"})["solution"] == str(value)


def test_an_answer_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="without '####'"):
        gsm8k({"question": "?", "answer": "42"})


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} -{t[2]})"),
    max_leaves=6,
)


@given(expressions)
def test_the_calculator_calculates(expression):
    assert calculate(expression) == eval(expression)


@pytest.mark.parametrize("text", ["open('x')", "x + 1", "2 ** 9", "'a' * 9", "(1).real"])
def test_the_calculator_only_calculates(text):
    with pytest.raises(ValueError, match="is not arithmetic"):
        calculate(text)


def test_the_boxed_reward_reads_the_last_message():
    called = [*says(""), {"role": "tool", "content": r"\boxed{3}"}, *says(r"\boxed{1,200}")]
    assert boxed_reward([called, called, says("1200"), says(None)], ["1200", "3", "1200", "1"]) == [1.0, 0.0, 0.0, 0.0]
