"""The command line: options, help, and errors that name the option before anything is trained."""

import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from typer.testing import CliRunner

import nestrec
from nestrec.balance import POLICIES
from nestrec.base.config import leaves
from nestrec.base.config_overrides import PASS_THROUGH, _field_names, apply_overrides, describe_fields
from nestrec.base.errors import UserError
from nestrec.base.option_synonyms import SYNONYMS
from nestrec.cli import console
from nestrec.cli.app import app, find_command
from nestrec.cli.console import PRINTED_ONCE_FOLDER, print_once
from nestrec.cli.help_panels import COMMAND_PANELS, COMMON_OPTIONS
from nestrec.cli.options_command import CONFIGS, find_config, option_text, undotted_options
from nestrec.data.formats.format_registry import FORMATS
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.training.recipes import RECIPES
from nestrec.training.recipes.auto_recipe import RECIPE_WITH_SAME_OPTIONS
from nestrec_bench.bench import BENCHES
from nestrec_bench.command import app as bench_app

COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def refusal(*arguments: str) -> UserError:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, UserError), result.output
    return result.exception


def test_train_rejects_missing_data_folder(tmp_path: Path) -> None:
    error = refusal("train", "demo", "--data.folder", str(tmp_path / "mien"), "--output", str(tmp_path / "run"))
    assert (error.option, error.value) == ("data.folder", str(tmp_path / "mien"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_train_names_unreadable_config_file(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert refusal("train", str(file), "--output", str(tmp_path / "run")).value == str(file)


def test_train_of_run_folder_names_resume_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    remedy = refusal("train", str(tmp_path)).remedy
    assert remedy is not None
    assert f"nestrec train {tmp_path}/config.json --output {tmp_path}" in remedy


def test_train_rejects_cluster_without_plan_only(tmp_path: Path) -> None:
    assert refusal("train", "demo", "--cluster", "cpu-hosts", "--output", str(tmp_path)).option == "--cluster"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("batch.batch_size", "0"),
        ("batch.num_micro_batches", "0"),
        ("optimizer.learning_rate", "-1"),
        ("task.encoder.dropout", "1.5"),
        ("task.negatives.num_negatives", "0"),
        ("task.history.query_time", "nxt"),
        ("task.evaluation.main_metric", "ndcg@7"),
        ("training.checkpoint_every_steps", "0"),
        ("training.early_stopping_patience", "0"),
        ("training.seed", "99999999999999999999"),
        ("pipeline.stale_steps", "3"),
        ("balance.cost.token", "-1"),
        ("task.history.stochastic_length_alpha", "0.5"),
    ],
)
def test_train_rejects_invalid_values_before_start(tmp_path: Path, option: str, text: str) -> None:
    assert refusal("train", "demo", f"--{option}", text, "--output", str(tmp_path / "run")).option == option
    assert list(tmp_path.iterdir()) == []


def test_train_rejects_negatives_with_full_softmax() -> None:
    error = refusal("train", "demo", "--task.loss", "full", "--task.negatives.sampler", "in_batch")
    assert error.option == "task.negatives.sampler"


def test_train_rejects_encoder_of_another_kind() -> None:
    remedy = refusal("train", "demo", "--task.encoder.kind", "sasrec").remedy
    assert remedy is not None
    assert remedy.startswith("here it can only be hstu; use a recipe with the other kind (see `nestrec recipes`), or")
    assert """--task.encoder '{"kind": "sasrec", ...}'""" in remedy


def test_train_rejects_two_batch_sizes(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    error = refusal("train", "demo", "--batch.batch_tokens", "512", "--output", run)
    assert error.remedy is not None
    assert "--batch.batch_size none" in error.remedy
    both = ("--batch.batch_tokens", "512", "--batch.batch_size", "none", "--data.folder", str(tmp_path / "no"))
    assert refusal("train", "demo", *both, "--output", run).option == "data.folder", "in any order"


def test_options_lists_every_field_of_every_command() -> None:
    named = [command for command in app.registered_commands if command.callback]
    commands = {command.name or command.callback.__name__: command for command in named}
    taking = [name for name, command in commands.items() if command.context_settings == PASS_THROUGH]
    assert sorted(taking) == sorted(["train", "plan", "tune", "prepare", "append", *CONFIGS])
    taking += ["load-test"]
    taking += [f"prepare {name}" for name in FORMATS] + [f"bench {name}" for name in BENCHES]
    for name in taking:
        config, _ = find_config(name.split())
        described = list(describe_fields(config))
        assert {field.name for field in described} >= set(leaves(config)) - {
            "balance.replay_changes",
            "pipeline.replay_changes",
        }
        assert [field.name for field in described if not field.meaning] == []


def test_options_can_be_searched_and_copied() -> None:
    result = CliRunner().invoke(app, ["options", "train", "demo", "table_learning_rate"])
    assert result.output.splitlines()[0] == "--optimizer.table_learning_rate none  (float, 0 or more | none)"
    assert refusal("options", "train", "demo", "nosuchword").value == "nosuchword"
    assert str(refusal("options", "bench", "relai").remedy).startswith("did you mean 'relay'?")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_bench_page_rejects_file_without_results(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "result.json"
    if content is not None:
        file.write_text(content)
    for arguments in (
        ("join", str(file), "--json", str(tmp_path / "all.json")),
        ("prediction", "--rows-of", str(file)),
    ):
        assert refusal("bench", *arguments).value == str(file)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("bench", ["attention", "layer", "lookup", "negatives", "step"])
def test_bench_of_gpu_reports_missing_gpu(bench: str) -> None:
    assert "CUDA device" in str(refusal("bench", bench))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_train_rejects_missing_gpu(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert refusal("train", "demo", "--training.device", "cuda", "--output", run).remedy is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "text"), [("port", "99999"), ("threads", "0"), ("service.engine.max_batch_tokens", "0")]
)
def test_serve_rejects_invalid_options_before_start(tmp_path: Path, option: str, text: str) -> None:
    assert refusal("serve", "--model", str(tmp_path), f"--{option}", text).option == option


def test_serve_names_folder_without_model(tmp_path: Path) -> None:
    assert refusal("serve", "--model", str(tmp_path), "--port", "0").value == str(tmp_path)


ENTRY = ".NAME."
"""stands for the name of an entry in the options of what has none yet"""


@pytest.mark.parametrize(
    "command",
    ["train demo", "train kuairand_ranking", "train criteo_dlrm", *(f"prepare {name}" for name in FORMATS), *CONFIGS],
)
def test_options_output_can_be_passed_back(command: str) -> None:
    config, _ = find_config(command.split())
    printed = {field.name: option_text(field.value) for field in describe_fields(config) if ENTRY not in field.name}
    assert apply_overrides(config, printed) == config


def test_options_lists_choices_of_balance_policy() -> None:
    printed = CliRunner().invoke(app, ["options", "train", "demo", "balance.policy"]).output
    assert all(name in printed.splitlines()[0] for name in POLICIES)
    assert refusal("train", "demo", "--balance.policy", "refind").remedy == "did you mean 'refined'?"


def test_options_without_path_get_full_names(tmp_path: Path) -> None:
    error = refusal("train", "demo", "--epochs", "3", "--output", str(tmp_path / "run"))
    assert error.remedy == "did you mean --training.epochs?"


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("train demo", "--data", "did you mean --data.folder"),
        ("train demo", "--loss", "did you mean --task.loss"),
        ("train demo", "--lr", "did you mean --optimizer.learning_rate"),
        ("train demo", "--learning-rate", "did you mean --optimizer.learning_rate"),
        ("train demo", "--batch_size", "did you mean --batch.batch_size"),
        ("train demo", "--device", "did you mean --training.device"),
        ("train demo", "--num_epochs", "did you mean --training.epochs"),
        ("train demo", "--layers", "did you mean --task.encoder.num_layers"),
        ("train ml_1m_sasrec", "--hidden_act", "did you mean --task.encoder.activation"),
        ("train demo", "--negatives", "did you mean --task.negatives.num_negatives"),
        ("train demo", "--training.epoch", "did you mean --training.epochs"),
        ("train demo", "--training.lr", "did you mean --optimizer.learning_rate"),
        ("train demo", "--gpus", "`nestrec options COMMAND` lists all"),
        ("train ranking", "--loss", "`nestrec options COMMAND` lists all"),
        ("prepare log events.csv out", "--timestamp", "did you mean --log.time"),
        ("serve --model models/mine", "--workers", "did you mean --frontend_workers or --num_instances"),
    ],
)
def test_option_synonyms_get_full_names(command: str, option: str, meant: str) -> None:
    assert meant in str(refusal(*command.split(), option, "3").remedy)


def test_load_balancer_nginx_names_template_instead() -> None:
    error = refusal("serve", "--model", "models/mine", "--num_instances", "2", "--load_balancer", "nginx")
    assert (error.option, error.value, error.problem) == ("load_balancer", "nginx", "was removed")
    assert "deploy/proxies/" in str(error.remedy)
    assert "--load_balancer gateway" in str(error.remedy)
    assert "'gateway'" in str(refusal("serve", "--model", "models/mine", "--load_balancer", "gatewy").remedy)


def test_options_suggest_real_commands_only() -> None:
    assert "nestrec bench --help" in str(refusal("options", "bench").remedy)
    assert refusal("options", "report").remedy == "see `nestrec report --help`"
    assert "bench NAME" in CliRunner().invoke(app, ["options"]).output


def test_recipe_names_in_errors_include_auto() -> None:
    assert "auto" in str(refusal("train", "hstu").remedy)
    assert "auto" in str(refusal("options", "train", "hstu").remedy)


def test_prepare_prints_kept_and_removed_rows(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,1\nu,1\nu,2\nv,2\n")
    (tmp_path / "items.csv").write_text("item,price,title\n1,2.5,One\n")
    paths = [str(tmp_path / name) for name in ("log.csv", "out", "items.csv")]
    result = CliRunner().invoke(app, ["prepare", "log", *paths[:2], "--items", paths[2], "--min_events_per_user", "2"])
    assert result.exception is None
    assert "exact duplicates: 1 kept (--duplicates drop drops them)" in result.output
    assert "removed by a filter: 1 events, rare users and items" in result.output
    assert "features of items: price (category), title (text)" in result.output


def test_formats_lists_descriptions() -> None:
    output = CliRunner().invoke(app, ["formats"]).output
    assert all(name in output and FORMATS.find(name).description[:20] in output for name in FORMATS)
    error = refusal("prepare", "movielens", "x", "y", "--log.user", "uid")
    assert "the format movielens does not have this option" in str(error)
    assert error.remedy == "remove this option; only these formats have it: log"


def test_version_option_prints_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"nestrec {nestrec.__version__}\n")


def test_options_alone_lists_the_commands() -> None:
    output = CliRunner().invoke(app, ["options"]).output
    assert all(f"nestrec options {name}" in output for name in ("train RECIPE", "prepare FORMAT", *CONFIGS))


def test_recipes_have_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, make in RECIPES.items() if not make.__doc__] == []
    monkeypatch.setenv("COLUMNS", "200")
    output = CliRunner().invoke(app, ["recipes"]).output
    assert "HSTU on MovieLens 20M, 16 layers" in output


def test_recipes_fit_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, ["recipes"]).output
    assert max(map(len, output.splitlines())) <= 80
    assert {*RECIPES, "auto"} <= {line.split()[0] for line in output.splitlines() if line.strip()}


def test_help_groups_commands_in_order_of_use() -> None:
    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    panels = [lines.index(line) for panel in COMMAND_PANELS for line in lines if f"─ {panel} ─" in line]
    assert len(panels) == len(COMMAND_PANELS)
    assert panels == sorted(panels)
    listed = [words[1] for line in lines[panels[0] :] if len(words := line.split(" ", 2)) == 3 and words[1]]
    assert [word for word in listed if word in COMMANDS] == [
        name for names in COMMAND_PANELS.values() for name in names
    ]


@pytest.mark.parametrize("command", COMMON_OPTIONS)
def test_help_shows_common_options_completely(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, [command, "--help"]).output
    assert [name for name, _, _ in COMMON_OPTIONS[command] if f" {name} " not in output] == []


def test_describe_names_missing_features(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,1\nu,2\nv,2\n")
    data = str(tmp_path / "data")
    assert CliRunner().invoke(app, ["prepare", "log", str(tmp_path / "log.csv"), data]).exit_code == 0
    result = CliRunner().invoke(app, ["describe", data])
    assert result.exit_code == 0
    assert "2 users, 2 items, 3 events" in result.output
    assert "features: none" in result.output


def test_options_list_each_choice_once() -> None:
    output = CliRunner().invoke(app, ["options", "train", "demo", "tables.NAME.eviction_policy"]).output
    assert output.splitlines()[0] == "--tables.NAME.eviction_policy null  (none | lru | lfu | ttl | null)"


@pytest.mark.parametrize(
    ("command", "name"),
    [("recommend", "users"), ("recommend", "k"), ("prepare log", "max_bad_fraction"), ("serve", "health_port")],
)
def test_error_of_default_shows_hyphens(command: str, name: str) -> None:
    words = command.split()
    find_config(words)  # imports the config
    error = UserError("problem", option=name, value=1)
    error.name_options(words, undotted_options(find_command(words), words))
    assert str(error) == f"--{name}=1: problem."


@pytest.mark.parametrize(("command", "name"), [("prepare log", "output"), ("describe", "dataset"), ("trian", "model")])
def test_error_of_argument_has_no_hyphens(command: str, name: str) -> None:
    words = command.split()
    error = UserError("problem", option=name, value=1)
    error.name_options(words, undotted_options(find_command(words), words))
    assert str(error) == f"{name}=1: problem."


@pytest.mark.parametrize(("command", "flag"), [("prepare log", "force"), ("serve", "insecure")])
def test_options_show_flags_without_value(command: str, flag: str) -> None:
    output = CliRunner().invoke(app, ["options", *command.split(), flag]).output
    assert f"--{flag}  (flag without a value)" in output.splitlines()


def test_help_shows_no_type_of_flags() -> None:
    names = [
        [command.name or command.callback.__name__.replace("_", "-")]
        for command in app.registered_commands
        if command.callback
    ]
    names += [
        ["bench", c.name or c.callback.__name__.replace("_", "-")] for c in bench_app.registered_commands if c.callback
    ]
    for words in ([], ["bench"], *names):
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "bool" not in result.output, words


def test_help_examples_are_valid_and_fit_80_columns() -> None:
    commands: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name in sorted(set(commands) - {"bench", "load-test"}):  # of the package nestrec-bench
        text = inspect.cleandoc(commands[name].help)
        rest = text.partition("\n\n")[2]
        assert max(len(re.sub(r"\[/?bold\]", "", line)) for line in rest.splitlines()) <= 78, name
        examples = [shlex.split(found) for found in re.findall(r"^- \[bold\]nestrec (.*?)\[/bold\]", rest, re.S | re.M)]
        assert examples, f"{name} shows no example"
        for example in examples:
            words = example[example.index("-n") + 2 :] if example[0] == "launch" else example
            if words[0].endswith(".py"):
                continue
            words = ["demo" if word == "auto" else word for word in words]
            own = {option for param in commands[words[0]].params for option in param.opts}
            dotted = {word[2:]: words[i + 1] for i, word in enumerate(words) if word[:2] == "--" and word not in own}
            if dotted:
                apply_overrides(find_config(words)[0], dotted)  # fails for unknown options


@pytest.mark.parametrize("inner", ["", "deeper/run"])
def test_output_below_a_file_is_rejected(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / inner)
    assert refusal("train", "demo", "--output", path).option == "--output"
    through = f"{path}/data"
    assert " file" in refusal("prepare", "synthetic", "tiny", through, "--num_users", "5").problem
    assert " file" in refusal("demo", "--output", f"{path}/x").problem
    assert " file" in refusal("bench", "evaluations", "run", "--json", f"{path}/x.json").problem
    assert " file" in refusal("plan", "demo", "--cluster", "cpu-hosts", "--html", f"{path}/x.html").problem
    with pytest.raises(UserError, match=r"is a file|the path contains the file"):
        generate(preset("tiny", num_users=5), Path(through))


def test_print_once_prints_one_message_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PRINTED_ONCE_FOLDER, str(tmp_path))
    for text in ("error: a", "error: a", "error: b"):
        print_once(text)
    assert capsys.readouterr().err == "error: a\nerror: b\n"


def test_launch_rejects_unknown_command_or_script() -> None:
    assert refusal("launch", "-n", "2").option == "launch"
    assert refusal("launch", "-n", "2", "trian", "demo").remedy == "did you mean 'train'?"
    assert refusal("launch", "-n", "2", "nothing.py").problem == "this script does not exist"


def test_option_synonyms_lead_to_existing_options() -> None:
    recipes = ("demo", "demo_fuxi", "ml_1m_sasrec", "ranking")
    commands = (*(f"train {recipe}" for recipe in recipes), "prepare log", "export", "serve", "recommend")
    names = [name for command in commands for name in _field_names(find_config(command.split())[0])]
    for word, ends in SYNONYMS.items():
        for end in ends:
            assert any(f".{name}".endswith(f".{end}") for name in names), (word, end)


@pytest.mark.parametrize("options", ["", " --log.user customer"])
def test_prepare_without_a_format_says_to_add_log(options: str) -> None:
    error = refusal(*f"prepare shop.csv data/x{options}".split())
    assert (error.option, error.value) == ("format", "shop.csv")
    assert "the format is missing before the path" in error.problem
    assert error.remedy == f"nestrec prepare log shop.csv data/x{options}"


def test_prepare_names_log_for_kinds_of_files() -> None:
    error = refusal("prepare", "csv", "shop.csv", "data/x")
    assert (error.option, error.value) == ("format", "csv")
    assert "nestrec prepare log INPUT OUTPUT" in str(error.remedy)
    assert "movielens" in str(refusal("prepare", "movilens", "in", "out").remedy)


@pytest.mark.parametrize(
    ("command", "field", "value", "remedy"),
    [
        ("serve --modle models/shop", "--modle", "models/shop", "did you mean --model?"),
        ("serve --models=models/shop", "--models", "models/shop", "did you mean --model?"),
        ("serve models/shop --port 80", "argument", "models/shop", "write nestrec serve --model models/shop --port 80"),
        ("serve models/a models/b", "argument", "models/a", "write nestrec serve --model models/a --model models/b"),
        ("plan demo cpu-hosts", "argument", "cpu-hosts", "write nestrec plan demo --cluster cpu-hosts"),
        ("recommend runs/a --out a.parquet", "--out", "a.parquet", "did you mean --output?"),
    ],
)
def test_commands_name_a_required_option(command: str, field: str, value: str, remedy: str) -> None:
    error = refusal(*command.split())
    assert (error.option, error.value, error.remedy) == (field, value, remedy)


def test_commands_without_arguments_show_usage() -> None:
    for command in (["serve"], ["serve", "--port", "80"], ["launch", "train", "demo"], ["plan", "demo"]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, "Missing option" in result.output) == (2, True)
    assert CliRunner().invoke(app, ["serve", "models/shop", "--help"]).exit_code == 0


def test_serve_of_run_folder_names_export_command(tmp_path: Path) -> None:
    run = tmp_path / "shop"
    run.mkdir()
    (run / "config.json").write_text("{}")
    error = refusal("serve", "--model", str(run), "--port", "0")
    assert (error.value, error.problem) == (str(run), "the folder is a run, not an exported model")
    assert error.remedy == f"export it: nestrec export {run} models/shop"


def test_options_of_auto_name_recipes_with_the_same_options() -> None:
    output = CliRunner().invoke(app, ["options", "train", "auto", "dropout"]).output
    lines = re.findall(r"nestrec (options train \w+ dropout) \(\w+\)", output)
    assert lines[0] == "options train demo dropout"
    assert len(lines) == len(RECIPE_WITH_SAME_OPTIONS)
    for line in lines:
        assert "dropout" in CliRunner().invoke(app, line.split()).output


def test_options_of_auto_lists_options_of_all_tasks() -> None:
    output = CliRunner().invoke(app, ["options", "train", "auto", "batch_size"]).output
    assert "--batch.batch_size  (" in output
    assert "nestrec options train demo batch_size (retrieval)" in output
    error = refusal("options", "train", "auto", "num_negatives")
    assert "nestrec options train demo num_negatives (retrieval)" in str(error.remedy)
    everything = CliRunner().invoke(app, ["options", "train", "auto"]).output
    options = re.findall(r"^--(\S+)  \(", everything, re.M)
    for name in RECIPE_WITH_SAME_OPTIONS.values():
        assert set(options) <= {field.name for field in describe_fields(RECIPES[name]())}


@pytest.mark.parametrize("name", ["bench", "load-test"])
def test_commands_of_missing_package_name_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EXTERNAL_COMMANDS", {})
    assert str(refusal(name, "stores")) == (
        f"nestrec {name} requires the package nestrec-bench, which is not installed. "
        "In a clone of the repository: pip install ./benchmarks."
    )
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert "(needs nestrec-bench)" in commands[name].help.splitlines()[0]


@pytest.mark.parametrize("option", ["--batch.batch-size", "--batch.batch_size"])
def test_options_accept_hyphens_and_underscores(option: str, tmp_path: Path) -> None:
    output = str(tmp_path / "run")
    error = refusal("train", "demo", option, "0", "--output", output)
    assert (error.option, error.value) == ("batch.batch_size", 0)


@pytest.mark.parametrize("option", ["--num-trials", "--num_trials"])
def test_options_of_commands_accept_underscores(option: str) -> None:
    error = refusal("tune", "demo", option, "2", "--search", "training.epochs", "--output", "search")
    assert "range" in error.problem, "the preceding option was accepted"
