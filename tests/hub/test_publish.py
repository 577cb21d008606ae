"""Model and traces published to a local server that speaks the Hub's protocol, and read back from it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard, HfApi, ModelCard

from tests.hub.fake_hub import TOKEN, FakeHub
from tests.processes import environment
from trl_support_replay.hub.model_card import add_section, section, summarize
from trl_support_replay.hub.traces import push_traces, traces_card
from trl_support_replay.traces.columns import TraceSchemaError, table_to_traces
from trl_support_replay.traces.survey import survey_traces

ROOT = Path(__file__).resolve().parents[2]


def run(hub, folder, *command, token=TOKEN):
    variables = environment(
        HF_ENDPOINT=hub.url,
        HF_HUB_OFFLINE="0",
        HF_HUB_DISABLE_XET="1",  # the fake takes LFS uploads
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HOME=str(folder / "hf"),
        HF_TOKEN=token,
        PYTHONPATH=str(ROOT),
    )
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=variables, capture_output=True, text=True, cwd=folder, timeout=300
    )
    return SimpleNamespace(code=done.returncode, text=done.stdout + done.stderr)


@pytest.fixture(scope="module")
def published(tiny_model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    with FakeHub() as hub:
        done = run(hub, folder, ROOT / "tests" / "hub" / "train_and_push.py", tiny_model_path, folder)
        assert done.code == 0, done.text[-3000:]
        yield SimpleNamespace(hub=hub, folder=folder, text=done.text)


def test_the_model_card_says_how_it_was_trained(published):
    files = published.hub.repos["models", "me/chars-grpo"]
    assert "model.safetensors" in files and "me/chars-grpo" in published.hub.private
    card = ModelCard(files["README.md"].decode())
    assert {"trl", "grpo", "support-replay", "importance-sampling"} <= set(card.data.tags)
    own = card.text[card.text.index("## Sampling-support replay") : card.text.index("### Framework versions")]
    assert "| sampling | temperature=1, top_p=0.9 |" in own
    assert "| engine | transformers " in own and "| supports from | the processed scores of each step |" in own
    assert "| optimizer steps | 2 |" in own
    assert "[me/chars-traces](https://huggingface.co/datasets/me/chars-traces)" in own
    gap = next(line for line in own.splitlines() if "recorded log-probs, largest" in line)
    assert 0 <= float(gap.split("|")[2]) <= 1e-4


def test_the_traces_are_there_with_a_card_and_load_from_the_hub(published, tmp_path):
    files = published.hub.repos["datasets", "me/chars-traces"]
    shards = sorted(published.folder.glob("traces/*.parquet"))
    assert {f.name for f in shards} | {"README.md"} == set(files)
    assert all(files[f.name] == f.read_bytes() for f in shards)
    card = DatasetCard(files["README.md"].decode())
    assert {"trl", "support-replay", "traces"} <= set(card.data.tags) and card.data.size_categories == ["n<1K"]
    assert "8 completions of" in card.text and "top_p=0.9" in card.text and "| `support_ids` |" in card.text
    assert str(published.folder) not in card.text  # no paths of the machine that sampled
    load = (
        "from datasets import load_dataset as l; d = l('me/chars-traces', split='train'); "
        "print('rows', len(d), d[0]['reward'], d.column_names)"
    )
    done = run(published.hub, tmp_path, "-c", load)
    assert done.code == 0 and "rows 8" in done.text and "support_ids" in done.text, done.text[-3000:]


def test_the_token_is_written_nowhere(published):
    """Not by any library at its most talkative, nor into any file."""
    assert "DEBUG" in published.text and TOKEN not in published.text
    for path in published.folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path
    for files in published.hub.repos.values():
        assert not any(TOKEN.encode() in data for data in files.values())


def push(hub, folder, traces, *more, token=TOKEN):
    arguments = ("-m", "trl_support_replay", "push", "--traces", traces, "--repo", "me/again", *more)
    return run(hub, folder, *arguments, token=token)


def test_the_command_publishes_traces(published, tmp_path):
    done = push(published.hub, tmp_path, published.folder / "traces", "--private")
    assert done.code == 0 and f"{published.hub.url}/datasets/me/again" in done.text, done.text
    assert "me/again" in published.hub.private
    assert len(published.hub.repos["datasets", "me/again"]) == 3


def test_a_wrong_token_is_one_message_without_the_token(published, tmp_path):
    wrong = "hf_" + "w" * 34
    done = push(published.hub, tmp_path, published.folder / "traces", token=wrong)
    assert done.code == 2 and done.text.startswith("error: me/again:") and "Traceback" not in done.text, done.text
    assert wrong not in done.text


def test_a_hub_out_of_reach_is_one_message(published, tmp_path):
    nowhere = SimpleNamespace(url="http://127.0.0.1:9")
    done = push(nowhere, tmp_path, published.folder / "traces")
    assert done.code == 2 and "the Hub cannot be reached" in done.text and "Traceback" not in done.text, done.text


def test_what_is_no_folder_of_shards_makes_no_repository(published, tmp_path):
    shard = sorted(published.folder.glob("traces/*.parquet"))[0]
    load_dataset("parquet", data_files=str(shard), split="train").save_to_disk(tmp_path / "saved")
    for traces in (shard, tmp_path / "saved"):
        arguments = ("-m", "trl_support_replay", "push", "--traces", traces, "--repo", "me/nothing")
        done = run(published.hub, tmp_path, *arguments)
        assert done.code == 2 and "is not a folder of Parquet files" in done.text, done.text
    assert ("datasets", "me/nothing") not in published.hub.repos


def test_broken_traces_are_not_uploaded(published, tmp_path, monkeypatch):
    (tmp_path / "traces").mkdir()
    whole = sorted(published.folder.glob("traces/*.parquet"))[0]
    table = pq.read_table(whole)
    empty = table.set_column(table.column_names.index("loss_mask"), "loss_mask", table["support_ids"].combine_chunks())
    pq.write_table(empty, tmp_path / "traces" / whole.name)
    monkeypatch.setattr(HfApi, "create_repo", None)
    with pytest.raises(TraceSchemaError, match=f"{whole.name}: "):
        push_traces(tmp_path / "traces", "me/broken")


def test_figures_of_a_card_are_those_of_the_traces(published):
    found = survey_traces(published.folder / "traces")
    traces = [t for f in sorted(published.folder.glob("traces/*.parquet")) for t in table_to_traces(pq.read_table(f))]
    sizes = [size for t in traces for size in t.supports.sizes if size > 0]
    text = traces_card(found, "me/x").text
    assert f"{len(traces)} completions of {sum(len(t.completion_ids) for t in traces)} tokens." in text
    assert f"| support size, mean | {sum(sizes) / len(sizes):.2f} |" in text
    assert f"| supports of one token | {sum(size == 1 for size in sizes) / len(sizes):.1%} |" in text
    assert "routed experts | not recorded" in text


FACTS = {"sampling": "temperature=1, top_k=5", "routed experts": "replayed", "optimizer steps": "7"}


def test_a_card_is_replaced_and_not_repeated(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("---\ntags:\n- trl\n---\n\n# Model\n\n### Framework versions\n\n- TRL: 1\n")
    add_section(path, FACTS)
    once = path.read_text()
    add_section(path, FACTS)
    assert path.read_text() == once and once.count("## Sampling-support replay") == 1
    assert section(FACTS) in once and "routed-experts-replay" in ModelCard(once).data.tags
    path.write_text(once.partition("### Framework versions")[0])  # of another template
    add_section(path, FACTS)
    assert path.read_text().count("## Sampling-support replay") == 1
    assert once.index("## Sampling-support replay") < once.index("### Framework versions") < once.index("- TRL: 1")


def test_a_run_is_summed_up_over_its_whole_history():
    history = [
        {"support/size_mean": 4.0, "support/logprob_gap_max": 1e-5, "support/repaired": 1},
        {"loss": 0.1},
        {"support/size_mean": 6.0, "support/logprob_gap_max": 3e-5, "support/repaired": 2},
    ]
    assert summarize(history) == {
        "support size, mean": 5.0,
        "gap of replayed to recorded log-probs, largest (nats)": 3e-5,
        "supports repaired": 3,
    }


def test_means_over_a_run_are_weighted_by_tokens():
    history = [{"support/size_mean": 4.0, "support/tokens": 30}, {"support/size_mean": 8.0, "support/tokens": 10}]
    assert summarize(history) == {"support size, mean": 5.0}
