"""The documentation does what it says: code is run, commands and options exist, links lead somewhere.

Python runs with a tiny model in the place of the one that a page names, two steps, and transformers' `generate` in the
place of vLLM. A block that is not run is marked, with the reason.
"""

import contextlib
import io
import itertools
import re
import shlex
from functools import cache

import pytest
import yaml

from scripts.make_reference import PAGES as GENERATED
from tests.docs.pages import PAGES, ROOT, anchors, blocks, links
from tests.trainers.conftest import build, checksum_reward, sums  # noqa: F401
from trl_support_replay.cli.main import command_modules, main

TITLES = [page.name for page in PAGES]
_LANGUAGES = {"", "python", "diff", "yaml"}


@pytest.mark.parametrize("page", PAGES, ids=TITLES)
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        if target.startswith(("http://", "https://")):
            continue
        place = page if not target else (page.parent / target).resolve()
        assert place.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(place), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=TITLES)
def test_blocks_are_of_a_known_kind_and_parse(page):
    for block in blocks(page):
        assert block.language in _LANGUAGES, f"{page.name}:{block.line} is {block.language!r}"
        if block.language == "python":
            compile(block.text, f"{page.name}:{block.line}", "exec")
        if block.language == "yaml":
            yaml.safe_load(block.text)


@pytest.fixture
def two_steps(monkeypatch, tiny_model_path, tmp_path):
    """What a page leaves to the machine: where it runs, for how long, and on which model."""
    import trl_support_replay
    from trl_support_replay import SupportReplayGRPOConfig

    class TwoSteps(SupportReplayGRPOConfig):
        def __init__(self, *args, **kwargs):
            ours = {"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "max_steps": 2}
            ours |= {"max_completion_length": 8, "per_device_train_batch_size": 4, "save_strategy": "no"}
            super().__init__(*args, **ours | {"num_generations": 4} | kwargs | {"use_vllm": False})

    monkeypatch.setattr(trl_support_replay, "SupportReplayGRPOConfig", TwoSteps, raising=False)
    monkeypatch.chdir(tmp_path)
    return tiny_model_path


def python_pages():
    return [page for page in PAGES if any(b.language == "python" and not b.not_run for b in blocks(page))]


@pytest.mark.parametrize("page", python_pages(), ids=lambda page: page.name)
def test_python_runs(page, two_steps, build):  # noqa: F811
    if page.name == "traces.md":  # it starts from traces that a run has saved
        settings = {"use_vllm": False, "top_p": 0.95, "top_k": 50, "save_traces": "runs/traces"}
        build(two_steps, **settings, max_completion_length=8).train()
    names = {"__name__": "page"}
    for block in blocks(page):
        if block.language == "python" and not block.not_run:
            text = block.text.replace("Qwen/Qwen3-0.6B", two_steps)
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 2 and names["trainer"].replays_support


@cache
def help_of(command):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        main([command, "--help"])
    return text.getvalue()


def command_lines(page):
    for block in blocks(page):
        joined = block.text.replace("\\\n", " ")
        for line in joined.splitlines() if block.language == "" else ():
            if match := re.search(r"trl-support-replay (?!\[)(.*)", line):
                with contextlib.suppress(ValueError):  # an apostrophe in what a command prints
                    yield shlex.split(match[1], comments=True)


@pytest.mark.parametrize("page", PAGES, ids=TITLES)
def test_commands_and_their_options_exist(page):
    for words in command_lines(page):
        assert words[0] in command_modules(), f"{page.name}: {words}"
        if words[0] == "vllm-serve":  # the rest is vLLM's
            continue
        from accelerate.commands.launch import launch_command_parser

        launch = " ".join(launch_command_parser()._option_string_actions) + " --accelerate_config"
        for option in (word for word in words if word.startswith("--")):
            known = help_of(words[0]) + (launch if words[0] == "grpo" else "")
            assert re.search(rf"{option}\b", known), f"{page.name}: {words[0]} has no {option}"


@pytest.mark.parametrize("page", PAGES, ids=TITLES)
def test_files_that_commands_name_exist(page):
    for name in itertools.chain.from_iterable(command_lines(page)):
        if name.startswith(("recipes/", "tests/", "benchmarks/")):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name):
    assert (ROOT / "docs" / name).read_text() == GENERATED[name](), "run: python -m scripts.make_reference"


def test_every_recipe_is_in_the_table():
    text = (ROOT / "docs" / "recipes.md").read_text()
    for recipe in (ROOT / "recipes").glob("*.yaml"):
        assert f"`{recipe.name}`" in text


def test_every_metric_that_is_logged_is_described():
    """Names are read off the code that logs them."""
    described = (ROOT / "docs" / "metrics.md").read_text()
    logged = set()
    for path in (ROOT / "trl_support_replay").rglob("*.py"):
        logged |= set(re.findall(r'"((?:support|routes|sampling)/\w+(?:/\w+)?)"', path.read_text()))
    assert len(logged) > 15
    for name in logged:
        family = re.sub(r"(_max|/min|/max)$", "", name)
        assert name in described or family in described, name
