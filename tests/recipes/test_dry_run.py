"""Every recipe as `grpo --dry_run` plans it: without weights, data, network or the devices it is for."""

import re
import socket
from pathlib import Path

import pytest
import yaml

from trl_support_replay.cli.commands import grpo
from trl_support_replay.cli.grpo_inputs.arguments import launch_options
from trl_support_replay.cli.main import main
from trl_support_replay.cli.planning.launch import Launch
from trl_support_replay.cli.planning.plan import plan_run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
# The configurations of the Hub's models, so that nothing is fetched.
CONFIGS = ROOT / "tests" / "data" / "configs"
SMALL = ["--model_name_or_path", str(CONFIGS / "Qwen3-0.6B"), "--dataset_name", "unread", "--output_dir", "unwritten"]
REWARD = ["--reward_funcs", "trl_support_replay.cli.demo.task.sum_reward"]


@pytest.fixture(autouse=True)
def offline(monkeypatch, request):
    """A recipe's own environment ends with its test; and a dry run that opened a connection would fail."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.chdir(ROOT)

    def refuse(self, address):
        raise AssertionError(f"a dry run connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def model_arguments(recipe, smollm2_path):
    name = yaml.safe_load(recipe.read_text())["model_name_or_path"]
    folder = smollm2_path if "SmolLM2" in name else CONFIGS / name.split("/")[-1]
    return ["--model_name_or_path", str(folder)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_is_planned_and_fits(recipe, smollm2_path, capsys):
    arguments = ["--config", str(recipe), *model_arguments(recipe, smollm2_path)]
    assert main(["grpo", *arguments, "--dry_run", "true"]) == 0
    text = capsys.readouterr().out
    assert "are needed, and nine tenths" not in text  # of the devices that its header names
    plan = plan_run(arguments, launch_options(arguments).accelerate)
    given = yaml.safe_load(recipe.read_text())
    settings = dict(plan.settings)
    cut = "top_k" if "top_k" in given else "vllm_structured_outputs_regex"
    assert f"{cut}={given[cut]}" in settings["sampling"]
    assert settings["processes"].startswith(f"{given.get('num_processes', 1)}, ")
    assert {"weights", "gradients", "optimizer", "activations", "scoring", "traces"} <= {i.name for i in plan.items}
    assert ("engine" in {i.name for i in plan.items}) == (given["use_vllm"] and given.get("vllm_mode") != "server")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_how_it_is_run_and_on_what(recipe):
    header = "".join(line.lstrip("# ") for line in recipe.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert f"--config recipes/{recipe.name}" in header and "Hardware: " in header
    memory = yaml.safe_load(recipe.read_text()).get("device_memory")
    if memory is not None:
        assert f"with {memory} GiB" in header
        assert re.search(r"Run: not\s+run; planned\s+with --dry_run only", header)


def test_a_setting_that_cannot_be_replayed_fails_the_dry_run(capsys):
    assert main(["grpo", *SMALL, *REWARD, "--dry_run", "--top_p", "0.9", "--repetition_penalty", "1.1"]) == 2
    assert "repetition_penalty=1.1 cannot be replayed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model_name_or_path", "nobody/nothing"], "The configuration of nobody/nothing cannot be read"),
        (["--reward_funcs", "no.such.reward"], "--reward_funcs no.such.reward: No module named 'no'"),
        (["--reward_funcs", "exact"], "neither one of accuracy_reward"),
        (["--tools", "recipes.tools.divide"], "--tools recipes.tools.divide"),
        (["--tools", "recipes.tools._OPERATORS"], "a dict cannot be called"),
        (["--reward_funcs", "math.pi"], "--reward_funcs math.pi: a float cannot be called"),
        (["--dataset_map", "math.pi"], "--dataset_map math.pi: a float cannot be called"),
        (["--dataset_map", "gsm9k"], "neither one of gsm8k, nor a dotted import path"),
        (["--routed_experts_replay", "true"], "is not a mixture of experts"),
        (["--per_device_train_batch_size", "3"], "must be divisible by num_generations (8)"),
        (["--topk", "5"], "unknown option --topk. Did you mean --top_k?"),
    ],
)
def test_what_would_fail_later_fails_now(change, message, capsys):
    assert main(["grpo", *SMALL, *REWARD, "--dry_run", *change]) == 2
    assert message in capsys.readouterr().err


def test_without_truncation_the_plan_says_that_it_is_stock():
    plan = plan_run([*SMALL, *REWARD], [])
    assert "stock GRPO" in dict(plan.settings)["replay"]
    assert "traces" not in {item.name for item in plan.items}
    assert any("Nothing is replayed" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("colocate", "max_completion_length=None: nothing bounds a completion"),
        ("server", "max_completion_length=None with vllm_mode='server'"),
    ],
)
def test_completions_without_a_bound_cannot_be_planned(tmp_path, mode, message, capsys):
    (tmp_path / "unbounded.yaml").write_text(f"max_completion_length: null\nuse_vllm: true\nvllm_mode: {mode}\n")
    arguments = ["--config", str(tmp_path / "unbounded.yaml"), *SMALL, *REWARD, "--top_k", "20", "--dry_run"]
    assert main(["grpo", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_plan_names_servers_without_their_credentials():
    server = [
        "--use_vllm",
        "true",
        "--vllm_mode",
        "server",
        "--weight_sync",
        "filesystem",
        "--weight_sync_dir",
        "unread",
    ]
    urls = ["--vllm_server_urls", "http://me:secret@a:8000", "http://b:8000"]
    engine = dict(plan_run([*SMALL, *REWARD, "--top_k", "20", *server, *urls], []).settings)["engine"]
    assert engine == "vLLM servers at http://a:8000, http://b:8000, weights over filesystem"


def test_a_device_that_is_too_small_is_told():
    arguments = [*SMALL, *REWARD, "--top_k", "20", "--dtype", "bfloat16"]
    assert plan_run([*arguments, "--device_memory", "24"], []).warnings == [
        "Prompts are taken for at most 512 tokens: nothing bounds them."
    ]
    assert "nine tenths of a device's 4 GiB are 3.6" in plan_run([*arguments, "--device_memory", "4"], []).warnings[0]


def test_batches_are_checked_against_the_processes_that_will_run():
    arguments = [*SMALL, *REWARD, "--per_device_train_batch_size", "1", "--num_generations", "8"]
    options = launch_options([*arguments, "--accelerate_config", "zero3"]).accelerate
    assert "8 per generation: 1 prompts x 8" in dict(plan_run(arguments, options).settings)["batch"]
    with pytest.raises(ValueError, match="divisible"):
        plan_run(arguments, [*options, "--num_processes", "4"])


@pytest.mark.parametrize(
    ("name", "method", "shards"),
    [
        ("multi_gpu", "DDP", (False, False, False)),
        ("zero1", "ZeRO-1", (True, False, False)),
        ("zero2", "ZeRO-2", (True, True, False)),
        ("zero3", "ZeRO-3", (True, True, True)),
        ("fsdp1", "FSDP1", (True, True, True)),
        ("fsdp2", "FSDP2", (True, True, True)),
        ("recipes/accelerate/ddp.yaml", "DDP", (False, False, False)),
        ("recipes/accelerate/zero2.yaml", "ZeRO-2", (True, True, False)),
        ("recipes/accelerate/zero3.yaml", "ZeRO-3", (True, True, True)),
        ("recipes/accelerate/fsdp2.yaml", "FSDP2", (True, True, True)),
    ],
)
def test_launches_are_read_as_accelerate_reads_them(name, method, shards):
    launch = Launch.read(launch_options([*SMALL, "--accelerate_config", name]).accelerate)
    assert (launch.processes, launch.method, launch.mixed_precision) == (8, method, "bf16")
    assert (launch.shards_optimizer, launch.shards_gradients, launch.shards_weights) == shards


def test_processes_that_split_a_model_share_their_samples():
    options = launch_options([*SMALL, "--accelerate_config", "recipes/accelerate/tp.yaml"]).accelerate
    launch = Launch.read(options)
    assert (launch.method, launch.processes, launch.tensor_parallel, launch.replicas) == ("tensor parallel", 2, 2, 1)


@pytest.mark.parametrize("launched", [True, False])
def test_a_recipe_under_a_launcher_starts_no_second_one(monkeypatch, launched):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(grpo, "_launch", lambda *_: 77)
    monkeypatch.setattr(grpo, "train", lambda *_: 88)
    recipe = str(ROOT / "recipes" / "fsdp2_qwen3_8b.yaml")
    assert main(["grpo", "--config", recipe]) == (88 if launched else 77)


def test_an_option_wins_over_the_file():
    options = launch_options([*SMALL, "--accelerate_config", "zero3", "--num_processes", "2"]).accelerate
    assert Launch.read(options).processes == 2
    assert Launch.read(["--num_processes", "3"]).method == "DDP"
    assert Launch.read([]) == Launch()


def test_a_torn_deepspeed_file_is_named(tmp_path):
    torn = tmp_path / "zero.json"
    torn.write_text('{"zero_opt')
    with pytest.raises(ValueError, match=r"zero\.json is not a JSON object"):
        Launch.read(["--use_deepspeed", "--deepspeed_config_file", str(torn)])
