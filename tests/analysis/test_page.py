"""`audit` from the command line, and its page in a real browser (skipped where there is none)."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from trl_support_replay.analysis.audit import audit_traces, load_traces
from trl_support_replay.analysis.audit.gaps import PARTS
from trl_support_replay.analysis.audit.page import render_page
from trl_support_replay.analysis.audit.report import build_report
from trl_support_replay.analysis.audit.token_view import MOST_CANDIDATES, add_samples
from trl_support_replay.cli.main import main
from trl_support_replay.policy.model_probe import Probe
from trl_support_replay.traces.columns import TraceSchemaError, traces_to_table
from trl_support_replay.traces.shards import ShardFolder
from trl_support_replay.traces.support import SupportRows

from .chromium import Page
from .conftest import edited, sample

needs_chromium = pytest.mark.needs("chromium")


def save(source, folder, temperature=None, model="tiny"):
    shards = ShardFolder(folder)
    for step in np.unique(source.steps):
        traces = [t for t, s in zip(source.traces, source.steps, strict=True) if s == step]
        sampling = {"temperature": temperature or source.temperature, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": 0}
        engine = {"name": "transformers", "version": "5"}
        shards.write(traces_to_table(traces, model=model, sampling=sampling, engine=engine), int(step))
    return folder


def observed(trace):
    """Two observations, and an end that nobody sampled."""
    loss_mask = np.ones(len(trace.loss_mask), bool)
    loss_mask[2:4] = False
    keep = np.where(loss_mask, np.arange(len(loss_mask)), -1)
    keep[-1] = -1
    recorded = np.where(keep >= 0, trace.sampling_logprobs, np.nan).astype(np.float32)
    ids = trace.completion_ids.copy()
    ids[-1] = 2
    return replace(
        trace, completion_ids=ids, loss_mask=loss_mask, supports=trace.supports.take(keep), sampling_logprobs=recorded
    )


@pytest.fixture(scope="module")
def saved(dense, tmp_path_factory):
    return save(edited(sample(dense, num=12), observed), tmp_path_factory.mktemp("audit") / "traces")


@pytest.fixture(scope="module")
def other_model(dense, tiny_model_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "other"
    model = copy.deepcopy(dense)
    model.lm_head.weight.data.mul_(0.9)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def written(saved, other_model, tiny_model_path, tmp_path_factory):
    """Report and folder of an audit with stale weights."""
    output = tmp_path_factory.mktemp("audit") / "report"
    argv = ("audit", "--traces", saved, "--model", other_model, "--sampler", tiny_model_path, "--output", output)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*map(str, argv)]) == 1  # there is a fault
    assert "Stale weights" in printed.getvalue() and "staleness" in printed.getvalue()
    return json.loads((output / "audit.json").read_text()), output


def test_the_report_says_what_was_audited(written):
    report, _ = written
    assert report["num_traces"] == report["num_saved"] == 12 and report["step_name"] == "step"
    assert report["origins"]["sampling"] == ["temperature=1, top_p=0.9, top_k=0, min_p=0, seed=0"]
    assert [f["cause"] for f in report["findings"]] == ["staleness", "truncation"]
    assert report["parts"]["staleness"]["mean_abs"] > 0.01 > 1e-4 > report["parts"]["numerics"]["max_abs"]


def test_the_report_is_consistent(written):
    report, _ = written
    for counts in report["histogram"]["counts"].values():
        assert sum(counts) == report["num_tokens"] and len(counts) == len(report["histogram"]["edges"]) - 1
    assert sum(row["tokens"] for row in report["sequences"]) == report["num_tokens"]
    assert sum(row["tokens"] for row in report["steps"]) == report["num_tokens"]
    assert [row["step"] for row in report["steps"]] == [0, 1, 2]
    for row in report["sequences"]:
        tokens = next(s for s in report["samples"] if s["trace"] == row["trace"])
        for name in ("total", *PARTS):
            assert len(tokens[name]) == len(tokens["ids"])
        assert row["stock"] == pytest.approx(sum(x for x in tokens["total"] if x is not None), abs=0.05)
        assert row["tokens"] == tokens["kind"].count("sampled") == len(tokens["ids"]) - 3
    assert {k for s in report["samples"] for k in s["kind"]} == {"sampled", "observation", "unsupported"}


def test_the_closed_form_is_the_ratio_when_truncation_is_all(dense):
    report = build_report(audit_traces(sample(dense), dense))
    for row in report["sequences"]:
        assert row["stock"] == pytest.approx(row["mass"], abs=1e-3) and abs(row["replayed"]) < 1e-3
        assert row["mass"] < 0


def test_supports_are_shown_with_probabilities_that_sum_to_one(dense):
    audit = audit_traces(sample(dense, num=3, top_p=0.75), dense, dense)
    report = build_report(audit)
    add_samples(report, audit, str, max_samples=3, max_bytes=10**6)
    full, cut = 0, 0
    for shown in report["samples"]:
        for t, (ids, probs, rollout) in enumerate(
            zip(shown["candidates"], shown["probs"], shown["rollout"], strict=True)
        ):
            assert shown["ids"][t] in ids and len(ids) == len(set(ids)) == min(shown["size"][t], MOST_CANDIDATES)
            assert rollout == probs  # the same model
            if shown["size"][t] <= MOST_CANDIDATES:
                full += 1
                assert sum(map(math.exp, probs)) == pytest.approx(1, abs=1e-3)
            else:
                cut += 1
                assert sum(map(math.exp, probs)) < 1
            assert probs[ids.index(shown["ids"][t])] == pytest.approx(shown["policy"][t], rel=1e-3, abs=1e-6)
    assert full > 5 and cut > 5
    assert all(str(v) in report["texts"] for s in report["samples"] for v in s["ids"])


def test_samples_stop_at_the_size(dense):
    audit = audit_traces(sample(dense), dense)
    sizes = []
    for max_bytes in (10**6, 30_000, 0):
        report = build_report(audit)
        add_samples(report, audit, str, max_samples=64, max_bytes=max_bytes)
        assert len(json.dumps(report)) <= max(max_bytes, 12_000)
        assert report["samples_left_out"] == 12 - len(report["samples"])
        sizes.append(len(report["samples"]))
    assert sizes[0] == 12 > sizes[1] > sizes[2] == 0


def test_sixty_four_samples_stay_below_two_megabytes(dense):
    """64 completions of up to 96 tokens with supports of 40 candidates."""
    source = sample(dense, num=64, tokens=96, top_p=1.0)
    rng = np.random.default_rng(0)

    def widened(trace):
        rows = [np.append(rng.choice(np.delete(np.arange(99), v), 39, replace=False), v) for v in trace.completion_ids]
        return replace(trace, supports=SupportRows.from_ragged(rows))

    audit = audit_traces(edited(source, widened), dense, tolerance=100.0)  # looks for no cause
    report = build_report(audit, eos_token_ids=[2])
    add_samples(report, audit, str, max_samples=64, max_bytes=1_800_000)
    assert len(render_page(report).encode()) < 2_000_000
    assert len(report["samples"]) + report["samples_left_out"] == 64 and len(report["samples"]) > 30


def test_traces_are_chosen_evenly(saved):
    chosen = load_traces(saved, 3)
    assert len(chosen.traces) == 3 and chosen.num_saved == 12 and chosen.steps.tolist() == [0, 1, 2]
    assert len(load_traces(saved, 100).traces) == 12


def test_one_step_can_be_chosen(saved):
    chosen = load_traces(saved, 100, step=1)
    assert len(chosen.traces) == chosen.num_saved == 4 and set(chosen.steps.tolist()) == {1}
    with pytest.raises(TraceSchemaError, match="has no traces of step 7; it has steps 0 to 2"):
        load_traces(saved, 100, step=7)


def test_a_finished_audit_is_not_lost(dense, saved, tmp_path, capsys):
    """Not for want of a tokenizer, and not for scores that are no numbers."""
    model = copy.deepcopy(dense)
    first = load_traces(saved, 100).traces[0]
    probed = set(Probe.run(dense).input_ids.flatten().tolist())
    with torch.no_grad():  # the probe of the model must not see it
        seen = next(i for i in first.completion_ids[:-1].tolist() if i not in probed)
        model.get_input_embeddings().weight[seen] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    arguments = [
        "audit",
        "--traces",
        str(saved),
        "--model",
        str(tmp_path / "broken"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 1
    assert "has no tokenizer, so the page shows ids" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert report["texts"]["5"] == "#5" and None in report["samples"][0]["policy"]


def test_several_temperatures_are_refused(dense, tmp_path, capsys):
    save(sample(dense, num=4), tmp_path)
    save(replace(sample(dense, num=4), steps=np.array([7] * 4)), tmp_path, temperature=0.5)
    with pytest.raises(TraceSchemaError, match=r"mix the temperatures \[0.5, 1.0\]"):
        load_traces(tmp_path, 10)
    assert main(["audit", "--traces", str(tmp_path), "--model", "x", "--output", str(tmp_path / "out")]) == 2
    assert "audit them apart" in capsys.readouterr().err


def test_a_live_trainers_model_can_be_audited(tiny_model_path, tmp_path):
    """The traces of its first batch were sampled with the weights that it started with."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from trl_support_replay import SupportReplayGRPOConfig, SupportReplayGRPOTrainer

    config = SupportReplayGRPOConfig(
        output_dir=str(tmp_path / "run"),
        save_traces=str(tmp_path / "traces"),
        top_p=0.9,
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=1e-2,
        save_strategy="no",
    )
    data = Dataset.from_dict({"prompt": ["1+1=", "2+1=", "3+1=", "4+1="]})
    trainer = SupportReplayGRPOTrainer(
        tiny_model_path, lambda completions, **_: [float(len(set(c))) for c in completions], config, train_dataset=data
    )
    trainer.train()
    start = AutoModelForCausalLM.from_pretrained(tiny_model_path)
    source = load_traces(tmp_path / "traces", 100)
    first = replace(source, traces=source.traces[:4], steps=source.steps[:4])
    audit = audit_traces(first, trainer.model, start)
    assert [f.cause for f in audit.findings] == ["staleness", "truncation"]
    assert np.abs(audit.parts["numerics"]).max() < 1e-4
    assert trainer.model.training


@needs_chromium
def test_the_page_shows_the_numbers_of_the_report(written, tmp_path):
    report, output = written
    with Page(output / "audit.html", tmp_path / "profile") as page:
        assert page.errors == [] and page.requests == [(output / "audit.html").as_uri()]
        assert page.value("document.getElementById('verdict').textContent") == report["verdict"]
        cells = page.value(
            "[...document.querySelectorAll('#parts tbody td[data-value]')].map("
            "(c) => [c.parentNode.dataset.part, c.dataset.field, c.dataset.value, c.textContent])"
        )
        shown = {"total", "truncation", "staleness", "numerics"}  # no routes in these traces
        assert {part for part, *_ in cells} == shown and len(cells) == 6 * len(shown)
        for part, field, value, text in cells:
            assert float(value) == report["parts"][part][field]
            assert float(text) == pytest.approx(float(value), rel=0.06)
        bars = page.value(
            "[...document.querySelectorAll('rect[data-part]')].map((r) => [r.dataset.part, +r.dataset.count])"
        )
        for part in shown:
            assert [n for p, n in bars if p == part] == [n for n in report["histogram"]["counts"][part] if n]
        marks = page.value(
            "[...document.querySelectorAll('circle[data-series]')].map((c) => [c.dataset.series, +c.dataset.value])"
        )
        for series in ("stock", "mass", "replayed"):
            assert [v for s, v in marks if s == series] == [row[series] for row in report["sequences"]]
        dots = page.value(
            "[...document.querySelectorAll('#steps circle')].map((c) => [c.dataset.field, +c.dataset.value])"
        )
        for field in ("size_mean", "mass_mean", "singletons", "left_mean"):
            assert [v for f, v in dots if f == field] == [row[field] for row in report["steps"]]
        for i, tokens in enumerate(report["samples"]):
            page.value(f"select({i}, null)")
            drawn = page.value(
                "[...document.querySelectorAll('#tokens .t')].map("
                "(t) => ['gap' in t.dataset ? +t.dataset.gap : null, t.className])"
            )
            assert [gap for gap, _ in drawn] == tokens["total"]
            for (_, classes), kind, size in zip(drawn, tokens["kind"], tokens["size"], strict=True):
                assert kind in classes and ("single" in classes) == (size == 1)
            assert ["eos" in classes for _, classes in drawn] == [False] * (len(drawn) - 1) + [True]


@needs_chromium
def test_hovering_a_token_shows_its_support(written, tmp_path):
    report, output = written
    with Page(output / "audit.html", tmp_path / "profile") as page:
        tokens = report["samples"][0]
        t = max(range(len(tokens["ids"])), key=lambda i: tokens["size"][i])
        page.hover(f".t[data-t='{t}']")
        figures = dict(
            page.value(
                "[...document.querySelectorAll('#detail dl div')].map((d) => [d.dataset.figure, +d.dataset.value])"
            )
        )
        assert figures["recorded"] == tokens["recorded"][t] and figures["gap"] == tokens["total"][t]
        assert figures["staleness"] == tokens["staleness"][t]
        values = page.value("[...document.querySelectorAll('#detail td[data-value]')].map((c) => +c.dataset.value)")
        sampled = tokens["candidates"][t].index(tokens["ids"][t])
        rollout = list(tokens["rollout"][t])
        rollout[sampled] = tokens["recorded"][t]
        assert values == [v for pair in zip(rollout, tokens["probs"][t], strict=True) for v in pair]
        page.press("ArrowRight")  # nothing has the focus yet
        page.value(f"document.querySelector('.t[data-t=\"{t}\"]').focus()")
        page.press("ArrowLeft")
        assert page.value("document.querySelector('.t.on').dataset.t") == str(t - 1)
        observation = tokens["kind"].index("observation")
        page.hover(f".t[data-t='{observation}']")
        assert "An observation" in page.value("document.getElementById('detail').textContent")
        assert page.errors == []


@needs_chromium
def test_on_a_phone_nothing_is_cut_off_and_a_tap_shows_the_support(written, tmp_path):
    report, output = written
    with Page(output / "audit.html", tmp_path / "profile", width=360, height=740, touch=True) as page:
        assert page.value("[innerWidth, document.documentElement.scrollWidth]") == [360, 360]
        wide = (
            "[...document.querySelectorAll('section *')].filter((e) => e.getBoundingClientRect().right > 360.5).length"
        )
        assert page.value(wide) == 0
        page.tap(".t[data-t='6']")
        panel = page.value(
            "(({top, bottom}) => [top, bottom])(document.getElementById('detail').getBoundingClientRect())"
        )
        assert 0 < panel[0] < panel[1] <= 741  # in view, and the token above it
        assert page.value("document.querySelector('.t.on').getBoundingClientRect().bottom") <= panel[0]
        assert str(report["samples"][0]["ids"][6]) in page.value("document.querySelector('#detail .muted').textContent")
        assert page.value(wide) == 0 and page.errors == []


@needs_chromium
def test_a_link_opens_its_token(written, tmp_path):
    _, output = written
    with Page(output / "audit.html", tmp_path / "profile", fragment="s2t7") as page:
        assert page.value("[state.sample, document.querySelector('.t.on').dataset.t]") == [2, "7"]
    with Page(output / "audit.html", tmp_path / "profile2", fragment="s2t7777") as page:
        assert page.value("[state.sample, state.token]") == [0, None] and page.errors == []


@needs_chromium
def test_texts_cannot_break_the_page(dense, tmp_path):
    audit = audit_traces(sample(dense, num=2), dense)
    report = build_report(audit, eos_token_ids=[2])
    add_samples(report, audit, lambda v: f"</script><script>boom()</script><!--{v}", max_samples=2, max_bytes=10**6)
    (tmp_path / "page.html").write_text(render_page(report))
    with Page(tmp_path / "page.html", tmp_path / "profile") as page:
        assert page.errors == []
        assert "</script><script>boom()" in page.value("document.querySelector('#tokens .t').textContent")


@needs_chromium
def test_a_page_without_tokens(dense, tmp_path):
    source = edited(sample(dense, num=2), lambda t: replace(t, loss_mask=np.zeros_like(t.loss_mask)))
    audit = audit_traces(source, dense)
    report = build_report(audit, eos_token_ids=[2])
    add_samples(report, audit, str, max_samples=2, max_bytes=10**6)
    (tmp_path / "page.html").write_text(render_page(report))
    with Page(tmp_path / "page.html", tmp_path / "profile") as page:
        assert page.errors == [] and "no gap" in page.value("document.getElementById('verdict').textContent")
