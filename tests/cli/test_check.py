"""`check` on scripts and YAML files: what is read, what is refused, what today's ratios are off by."""

import textwrap
from pathlib import Path

import pytest

from trl_support_replay.cli.main import main
from trl_support_replay.cli.migration.reading import read_settings, replaced_import
from trl_support_replay.cli.migration.verdict import judge
from trl_support_replay.errors import CommandError
from trl_support_replay.settings.config import SupportReplayGRPOConfig
from trl_support_replay.settings.contract import UnreplayableSettingError

SCRIPT = """
    import trl
    from trl import GRPOConfig as Config, GRPOTrainer

    raise SystemExit("a check does not run the script")
    NUCLEUS = 0.9
    SAMPLING = dict(top_k=20, generation_kwargs={"presence_penalty": 0.5, "stop": ["."]})
    steps = 3
    steps += 1
    args = Config("out", use_vllm=True, top_p=NUCLEUS, max_steps=steps, learning_rate=rate(), **SAMPLING)
    other = trl.GRPOConfig(output_dir="other")
"""


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_a_script_is_read_and_not_run(write):
    first, second = read_settings(write("train.py", SCRIPT))
    args, stock = first.args, SupportReplayGRPOConfig
    assert (args.use_vllm, args.top_p, args.top_k, args.min_p) == (True, 0.9, 20, None)
    assert args.generation_kwargs == {"presence_penalty": 0.5, "stop": ["."]}
    assert (args.learning_rate, args.max_steps) == (stock.learning_rate, stock.max_steps)
    assert first.unread == {"max_steps": "steps", "learning_rate": "rate()"}
    assert first.where == "train.py:10" and first.imports == ((3, "from trl import GRPOConfig as Config, GRPOTrainer"),)
    assert second.args.output_dir == "other" and second.args.top_p == 1.0


@pytest.mark.parametrize(
    "other",
    ["for K in (1, 2): pass", "def f(K): pass", "from settings import K", "K += 1", "with open('x') as K: pass"],
)
def test_a_name_with_several_values_is_not_read(write, capsys, other):
    path = write("a.py", f"K = 20\n{other}\nargs = GRPOConfig('out', use_vllm=True, top_k=K)\n")
    assert main(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert "a.py:3: as far as it can be read without a run, no token is cut" in text and "not read: top_k=K" in text


def test_a_setting_that_is_assigned_later_is_not_read(write, capsys):
    assert main(["check", str(write("a.py", "args = GRPOConfig('out')\nargs.top_p = 0.9\nself.seed = 1\n"))]) == 0
    text = capsys.readouterr().out
    assert "as far as it can be read" in text and "not read: args.top_p=0.9" in text and "seed" not in text


def test_imports_keep_their_names_and_what_is_not_ours():
    text = "from trl import GRPOConfig as C, GRPOTrainer, get_peft_config as peft"
    assert replaced_import(text) == (
        "from trl import get_peft_config as peft; from trl_support_replay import SupportReplayGRPOConfig as C, "
        "SupportReplayGRPOTrainer as GRPOTrainer"
    )


def test_rloo_is_read_as_well(write, capsys):
    script = "from trl import RLOOConfig, RLOOTrainer\nargs = RLOOConfig('out', use_vllm=True, top_k=20)\n"
    assert main(["check", str(write("rloo.py", script))]) == 0
    text = capsys.readouterr().out
    assert "top_k=20 would be replayed" in text and "SupportReplayRLOOTrainer as RLOOTrainer" in text
    assert "no ratio of policy to sampler is taken" in text
    assert main(["check", str(write("rloo.py", script.replace("top_k", "vllm_mode='server', top_k")))]) == 1
    assert "refused: vllm_mode='server' cannot be replayed" in capsys.readouterr().out


def test_yaml_is_read_as_the_command_reads_it(write):
    text = "use_vllm: true\ntop_p: 9e-1\ntop_k: 20\ngeneration_kwargs: '{\"seed\": 1}'\n"
    (found,) = read_settings(write("grpo.yaml", text + "num_processes: 2\nmodel_name_or_path: mine\n"))
    args = found.args
    assert (args.use_vllm, args.top_p, args.top_k, args.max_completion_length) == (True, 0.9, 20, 512)
    assert judge(args).sampling.truncates and not judge(args).refused


def test_mappings_may_be_json_and_merged_ones_are_not_read(write):
    script = """
        from trl import GRPOConfig
        a = GRPOConfig("out", top_p=0.9, generation_kwargs='{"seed": 1}')
        b = GRPOConfig("out", top_p=0.9, generation_kwargs={**extra, "seed": 1})
    """
    first, second = read_settings(write("train.py", script))
    assert judge(first.args).sampling.truncates and not judge(first.args).refused
    assert second.unread == {"generation_kwargs": "{**extra, 'seed': 1}"}


def test_unknown_names_are_named(write, capsys):
    assert main(["check", str(write("a.yaml", "top_p: 0.9\ntopk: 20\ndataset_name: mine\n"))]) == 2
    assert "unknown option --topk. Did you mean --top_k?" in capsys.readouterr().err
    assert main(["check", str(write("a.py", "GRPOConfig('out', top_p=0.9, topk=20, zzz=1)"))]) == 1
    text = capsys.readouterr().out
    assert "unknown: there is no setting topk.\n" in text
    assert "unknown: there is no setting zzz.\n" in text


def test_every_refusal_is_named_not_only_the_first(write, capsys):
    path = write(
        "bad.yaml",
        """
        use_vllm: true
        top_p: 0.9
        temperature: 0.8
        repetition_penalty: -1
        generation_kwargs: {temperature: 0.7, bad_words: [never], n: 2}
        vllm_structured_outputs_regex: a+
        """,
    )
    assert main(["check", str(path)]) == 1
    text = capsys.readouterr().out
    for setting in (
        "generation_kwargs['temperature']=0.7",
        "repetition_penalty=-1",
        "generation_kwargs['n']=2",
    ):
        assert f"refused: {setting} cannot be replayed" in text
    assert text.count("refused:") == 3
    assert "top_p=0.9, bad_words=['never'], vllm_structured_outputs_regex=a+ can be replayed once" in text


def test_what_stock_scoring_gets_wrong_is_refused_without_truncation_too(write, capsys):
    path = write("a.yaml", "use_vllm: true\ngeneration_kwargs: {presence_penalty: 0.5, presence_penalti: 1}")
    assert main(["check", str(path)]) == 1
    text = capsys.readouterr().out
    assert (
        "no token is cut, but training stops at the refused settings" in text
        and "generation_kwargs['presence_penalty']=0.5 cannot be replayed" in text
    )
    assert "generation_kwargs['presence_penalti']=1 cannot be replayed: it is unknown here" in text
    assert "Did you mean presence_penalty?" in text


def test_what_today_does_and_what_to_change(write, capsys):
    assert main(["check", str(write("train.py", SCRIPT)), "--kept-mass", "0.9", "--length", "200"]) == 0
    text = capsys.readouterr().out
    assert "0.9^200 = 7.06e-10" in text and "top_p=0.9 keeps at least 0.9 of what top_k=20 leaves" in text
    assert "not read: learning_rate=rate()" in text
    assert "becomes: from trl_support_replay import SupportReplayGRPOConfig as Config, SupportReplay" in text
    assert "train.py:11: no token is cut" in text


MOVED = """
    from trl_support_replay import SupportReplayGRPOConfig as GRPOConfig, SupportReplayGRPOTrainer as GRPOTrainer
    args = GRPOConfig("out", use_vllm=True, top_p=0.95, top_k=20)
"""


def test_who_has_moved_over_has_nothing_to_change(write, capsys):
    assert main(["check", str(write("train.py", MOVED))]) == 0
    text = capsys.readouterr().out
    assert "with TRL's own trainer, with 0.95 of the mass kept" in text and "0.9 of the mass" not in text
    assert not any(word in text for word in ("today", "becomes", "in the place of"))


def test_a_bound_that_is_missing_is_not_made_up(write, capsys):
    assert main(["check", str(write("a.yaml", "use_vllm: true\ntop_p: 0.95\ngeneration_kwargs: '{\"n\": 2}'"))]) == 1
    text = capsys.readouterr().out
    assert "a.yaml: top_p=0.95 can be replayed once the refused settings are changed." in text
    assert "top_p=0.95 keeps at least 0.95 of it." in text and "with 0.9 of" not in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("use_vllm: false\ntop_p: 0.9", "no ratio of policy to sampler is taken"),
        ("use_vllm: true\ntop_k: 5\nvllm_importance_sampling_mode: token_truncate", "each token's ratio is multiplied"),
        ("use_vllm: true\ntop_k: 5\nvllm_mode: server", "trl-support-replay vllm-serve"),
        ("top_p: 1.0", "training would be stock GRPO"),
    ],
)
def test_verdicts(write, capsys, settings, message):
    assert main(["check", str(write("a.yaml", settings))]) == 0
    assert message in capsys.readouterr().out


def test_generation_arguments_that_are_no_mapping_are_refused(write, capsys):
    assert main(["check", str(write("a.yaml", "top_p: 0.9\ngeneration_kwargs: top_k=5"))]) == 1
    assert "refused: generation_kwargs='top_k=5' cannot be replayed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "top_k: 20\nmin_p: 1e-2\n", "top_k=20, min_p=0.01 would be replayed."),
        ("a.yaml", "use_vllm: true\ntop_k: 20\nvllm_importance_sampling_mode: null\n", "top_k=20 would be replayed."),
        ("a.py", "GRPOConfig(top_k=20, generation_kwargs={'sequence_bias': {(5,): -1.0}})", "sequence_bias"),
        ("a.py", "GRPOConfig(top_k=20, generation_kwargs={1: 2})", "generation_kwargs[1]=2 cannot be replayed"),
        ("a.py", "GRPOConfig(top_k=20, **{1: 2})", "there is no setting 1."),
        ("a.py", "GRPOConfig(top_k=20, generation_kwargs={[1]: 2})", "not read: generation_kwargs="),
        (
            "a.py",
            "GRPOConfig(use_vllm=True, top_k=20, vllm_engine_kwargs={'max_logprobs': 'many'})",
            "vllm_engine_kwargs['max_logprobs']='many' cannot be replayed",
        ),
    ],
)
def test_odd_values_have_a_verdict(write, capsys, name, text, message):
    assert main(["check", str(write(name, text))]) in (0, 1)
    assert message in capsys.readouterr().out


def test_a_script_that_names_the_module_is_told_which_classes_to_take(write, capsys):
    assert main(["check", str(write("a.py", "import trl\nargs = trl.RLOOConfig('out', top_p=0.9)\n"))]) == 0
    text = capsys.readouterr().out
    assert "take SupportReplayRLOOConfig and SupportReplayRLOOTrainer of trl_support_replay" in text
    assert "trl grpo" not in text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "import trl\n", "makes no GRPOConfig"),
        ("a.py", "def (", "cannot be read as Python: invalid syntax"),
        ("a.py", None, "cannot be read as Python: [Errno 2]"),
        ("a.yaml", "- a\n", "must contain a YAML mapping"),
        ("a.yaml", "a: [", "while parsing a flow"),
        ("a.yaml", "max_completion_length: long\n", "argument --max_completion_length"),
        ("a.yaml", None, "No such file"),
        ("a.yaml", "1: 2\n", "keywords must be strings"),
        ("a.yaml", "run_name: !!int abc\n", "invalid literal for int"),
        (
            "a.sh",
            "trl grpo --top_k 5\n",
            "is neither Python (.py) nor YAML (.yaml, .yml). To check a command line, run it",
        ),
    ],
)
def test_files_that_say_nothing_are_refused(write, capsys, name, text, message):
    path = write(name, text or "")
    if text is None:
        path.unlink()
    with pytest.raises(CommandError, match="."):
        read_settings(path)
    assert main(["check", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--kept_mass", "1.5"], ["--length", "0"], ["--kept-mass", "0"]])
def test_impossible_figures_are_refused(write, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["check", str(write("a.yaml", "top_p: 0.9")), *arguments])
    assert arguments[0].replace("-mass", "_mass") in capsys.readouterr().err


@pytest.mark.parametrize("recipe", sorted(Path("recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_our_own_recipes_pass(recipe):
    (found,) = read_settings(recipe)
    assert judge(found.args).sampling.truncates and not judge(found.args).refused


def test_the_verdict_is_that_of_the_configuration_itself(write, tmp_path):
    text = "use_vllm=True, top_k=20, generation_kwargs={'n': 2}"
    with pytest.raises(UnreplayableSettingError) as refused:
        eval(f"SupportReplayGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], {text})")
    (found,) = read_settings(write("a.py", f"GRPOConfig({text})"))
    assert [str(error) for error in judge(found.args).refused] == [str(refused.value)]
