"""Mistakes on the command line: each ends with a message that names the field, and nothing is trained."""

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
from nestrec.base.config_overrides import _HABITS, PASSED_ON, _field_names, describe, with_overrides
from nestrec.base.errors import UserError
from nestrec.cli.app import app
from nestrec.cli.console import SAID_FOLDER, say_once
from nestrec.cli.options_command import CONFIGS, config_of, option_text
from nestrec.data.formats.format_registry import FORMATS
from nestrec.data.synthetic.synthetic_logs import generate, preset
from nestrec.training.recipes import RECIPES
from nestrec.training.recipes.auto_recipe import OPTIONS_OF
from nestrec_bench.bench import BENCHES
from nestrec_bench.command import app as bench_app


def refusal(*arguments: str) -> UserError:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, UserError), result.output
    return result.exception


def test_a_mistyped_data_folder_is_not_filled_with_synthetic_logs(tmp_path: Path) -> None:
    error = refusal("train", "demo", "--data.folder", str(tmp_path / "mien"), "--output", str(tmp_path / "run"))
    assert (error.option, error.value) == ("data.folder", str(tmp_path / "mien"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_config_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    assert refusal("train", str(file), "--output", str(tmp_path / "run")).value == str(file)


def test_a_run_given_as_a_recipe_says_how_to_go_on_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    remedy = refusal("train", str(tmp_path)).remedy
    assert remedy is not None
    assert f"nestrec train {tmp_path}/config.json --output {tmp_path}" in remedy


def test_a_cluster_is_refused_where_nothing_is_planned(tmp_path: Path) -> None:
    assert refusal("train", "demo", "--cluster", "cpu-hosts", "--output", str(tmp_path)).option == "--cluster"


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("batch.batch_samples", "0"),
        ("batch.micro_batches", "0"),
        ("optimizer.learning_rate", "-1"),
        ("task.encoder.dropout", "1.5"),
        ("task.num_negatives", "0"),
        ("task.history.query_time", "nxt"),
        ("task.evaluation.headline", "ndcg@7"),
        ("training.checkpoint_every_steps", "0"),
        ("training.patience", "0"),
        ("training.seed", "99999999999999999999"),
        ("pipeline.stale_steps", "3"),
        ("balance.cost.token", "-1"),
        ("task.history.stochastic_length_alpha", "0.5"),
    ],
)
def test_a_value_that_no_run_can_have_is_refused_before_anything_starts(tmp_path: Path, option: str, text: str) -> None:
    assert refusal("train", "demo", f"--{option}", text, "--output", str(tmp_path / "run")).option == option
    assert list(tmp_path.iterdir()) == []


def test_negatives_of_a_loss_that_draws_none_are_refused() -> None:
    error = refusal("train", "demo", "--task.loss", "full", "--task.negatives.sampler", "in_batch")
    assert error.option == "task.negatives.sampler"


def test_another_kind_of_model_is_another_recipe() -> None:
    remedy = refusal("train", "demo", "--task.encoder.kind", "sasrec").remedy
    assert remedy is not None
    assert remedy.startswith("here it can only be hstu; take a recipe of the other kind (see `nestrec recipes`), or")
    assert """--task.encoder '{"kind": "sasrec", ...}'""" in remedy


def test_the_size_of_a_batch_is_given_once(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    error = refusal("train", "demo", "--batch.batch_tokens", "512", "--output", run)
    assert error.remedy is not None
    assert "--batch.batch_samples none" in error.remedy
    both = ("--batch.batch_tokens", "512", "--batch.batch_samples", "none", "--data.folder", str(tmp_path / "no"))
    assert refusal("train", "demo", *both, "--output", run).option == "data.folder", "in any order"


def test_options_lists_every_field_of_every_command_that_takes_dotted_options() -> None:
    commands = {command.callback.__name__: command for command in app.registered_commands if command.callback}
    taking = [name for name, command in commands.items() if command.context_settings == PASSED_ON]
    assert sorted(taking) == sorted(["train", "plan", "tune", "prepare", "append", *CONFIGS])
    taking += ["replay"]
    taking += [f"prepare {name}" for name in FORMATS] + [f"bench {name}" for name in BENCHES]
    for name in taking:
        config, _ = config_of(name.split())
        described = list(describe(config))
        assert {field.name for field in described} >= set(leaves(config)) - {"balance.replay", "pipeline.replay"}
        assert [field.name for field in described if not field.meaning] == []


def test_options_can_be_searched_and_copied() -> None:
    result = CliRunner().invoke(app, ["options", "train", "demo", "table_learning_rate"])
    assert result.output.splitlines()[0] == "--optimizer.table_learning_rate none  (float, 0 or more | none)"
    assert refusal("options", "train", "demo", "nosuchword").value == "nosuchword"
    assert str(refusal("options", "bench", "relai").remedy).startswith("did you mean 'relay'?")


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_file_that_is_no_result_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
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
def test_a_benchmark_of_a_gpu_says_that_there_is_none(bench: str) -> None:
    assert "no GPU" in str(refusal("bench", bench))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_training_on_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert refusal("train", "demo", "--training.device", "cuda", "--output", run).remedy is not None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "text"), [("port", "99999"), ("threads", "0"), ("service.engine.max_batch_tokens", "0")]
)
def test_a_server_that_could_not_serve_is_refused_before_it_starts(tmp_path: Path, option: str, text: str) -> None:
    assert refusal("serve", "--model", str(tmp_path), f"--{option}", text).option == option


def test_a_folder_without_an_exported_model_is_named(tmp_path: Path) -> None:
    assert refusal("serve", "--model", str(tmp_path), "--port", "0").value == str(tmp_path)


ENTRY = ".NAME."
"""stands for the name of an entry in the options of what has none yet"""


@pytest.mark.parametrize(
    "command",
    ["train demo", "train kuairand_ranking", "train criteo_dlrm", *(f"prepare {name}" for name in FORMATS), *CONFIGS],
)
def test_what_options_prints_can_be_given_back(command: str) -> None:
    config, _ = config_of(command.split())
    printed = {field.name: option_text(field.value) for field in describe(config) if ENTRY not in field.name}
    assert with_overrides(config, printed) == config


def test_the_choices_of_a_balance_policy_are_listed() -> None:
    printed = CliRunner().invoke(app, ["options", "train", "demo", "balance.policy"]).output
    assert all(name in printed.splitlines()[0] for name in POLICIES)
    assert refusal("train", "demo", "--balance.policy", "refind").remedy == "did you mean 'refined'?"


def test_an_option_without_its_path_says_where_it_is(tmp_path: Path) -> None:
    error = refusal("train", "demo", "--epochs", "3", "--output", str(tmp_path / "run"))
    assert error.remedy == "did you mean 'training.epochs'?"


@pytest.mark.parametrize(
    ("command", "option", "meant"),
    [
        ("train demo", "--data", "did you mean 'data.folder'"),
        ("train demo", "--loss", "did you mean 'task.loss'"),
        ("train demo", "--lr", "did you mean 'optimizer.learning_rate'"),
        ("train demo", "--learning-rate", "did you mean 'optimizer.learning_rate'"),
        ("train demo", "--batch_size", "did you mean 'batch.batch_samples'"),
        ("train demo", "--device", "did you mean 'training.device'"),
        ("train demo", "--num_epochs", "did you mean 'training.epochs'"),
        ("train demo", "--layers", "did you mean 'task.encoder.num_layers'"),
        ("train demo", "--negatives", "did you mean 'task.num_negatives'"),
        ("train demo", "--training.epoch", "did you mean 'training.epochs'"),
        ("train demo", "--training.lr", "did you mean 'optimizer.learning_rate'"),
        ("train demo", "--gpus", "`nestrec options COMMAND` lists all"),
        ("train ranking", "--loss", "`nestrec options COMMAND` lists all"),
        ("prepare log events.csv out", "--timestamp", "did you mean 'log.time'"),
        ("serve --model models/mine", "--workers", "did you mean 'instances'"),
    ],
)
def test_options_from_habit_get_full_names(command: str, option: str, meant: str) -> None:
    assert meant in str(refusal(*command.split(), option, "3").remedy)


def test_front_nginx_names_template_instead() -> None:
    error = refusal("serve", "--model", "models/mine", "--instances", "2", "--front", "nginx")
    assert (error.option, error.value, error.problem) == ("front", "nginx", "was removed")
    assert "deploy/proxies/" in str(error.remedy)
    assert "--front gateway" in str(error.remedy)
    assert "'gateway'" in str(refusal("serve", "--model", "models/mine", "--front", "gatewy").remedy)


def test_options_suggest_real_commands_only() -> None:
    assert "nestrec bench --help" in str(refusal("options", "bench").remedy)
    assert refusal("options", "report").remedy == "see `nestrec report --help`"
    assert "bench NAME" in CliRunner().invoke(app, ["options"]).output


def test_recipe_names_in_errors_include_auto() -> None:
    assert "auto" in str(refusal("train", "hstu").remedy)
    assert "auto" in str(refusal("options", "train", "hstu").remedy)


def test_prepare_says_what_it_kept_removed_and_understood(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item\nu,1\nu,1\nu,2\nv,2\n")
    (tmp_path / "items.csv").write_text("item,price,title\n1,2.5,One\n")
    paths = [str(tmp_path / name) for name in ("log.csv", "out", "items.csv")]
    result = CliRunner().invoke(app, ["prepare", "log", *paths[:2], "--items", paths[2], "--user_core", "2"])
    assert result.exception is None
    assert "exact duplicates: 1 kept (--duplicates drop drops them)" in result.output
    assert "removed by a filter: 1 events, rare users and items" in result.output
    assert "features of items: price (category), title (text)" in result.output


def test_formats_are_listed_with_what_they_are() -> None:
    output = CliRunner().invoke(app, ["formats"]).output
    assert all(name in output and FORMATS.find(name).description[:20] in output for name in FORMATS)
    error = refusal("prepare", "movielens", "x", "y", "--log.user", "uid")
    assert "is not an option of the format movielens" in str(error)
    assert error.remedy == "leave it out; it belongs to log"


def test_the_version_can_be_asked_for() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"nestrec {nestrec.__version__}\n")


def test_options_alone_lists_the_commands() -> None:
    output = CliRunner().invoke(app, ["options"]).output
    assert all(f"nestrec options {name}" in output for name in ("train RECIPE", "prepare FORMAT", *CONFIGS))


def test_every_recipe_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [name for name, make in RECIPES.items() if not make.__doc__] == []
    monkeypatch.setenv("COLUMNS", "200")
    output = CliRunner().invoke(app, ["recipes"]).output
    assert "HSTU on MovieLens 20M, 16 layers" in output


def test_recipes_are_named_in_full_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, ["recipes"]).output
    assert max(map(len, output.splitlines())) <= 80
    assert {*RECIPES, "auto"} <= {line.split()[0] for line in output.splitlines() if line.strip()}


def test_help_lists_the_commands_on_data_between_measuring_a_run_and_exporting_it() -> None:
    lines = CliRunner().invoke(app, ["--help"]).output.splitlines()
    listed = [words[1] for line in lines if len(words := line.split(" ", 2)) == 3 and words[1]]
    on_data = ["prepare", "append", "compact", "restore", "follow", "describe", "formats"]
    first = listed.index("eval")
    assert listed[first : first + len(on_data) + 2] == ["eval", *on_data, "export"]


def test_help_shows_no_type_of_flags() -> None:
    names = [[command.name or command.callback.__name__] for command in app.registered_commands if command.callback]
    names += [["bench", c.name or c.callback.__name__] for c in bench_app.registered_commands if c.callback]
    for words in ([], ["bench"], *names):
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, words
        assert "bool" not in result.output, words


def test_help_of_every_command_shows_examples_that_it_takes_in_lines_of_80_columns() -> None:
    commands: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for name in sorted(set(commands) - {"bench", "replay"}):  # of the package nestrec-bench
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
                with_overrides(config_of(words)[0], dotted)  # refuses what it does not know


@pytest.mark.parametrize("inner", ["", "deeper/run"])
def test_an_output_that_runs_through_a_file_is_refused_by_name(tmp_path: Path, inner: str) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / inner)
    assert refusal("train", "demo", "--output", path).option == "--output"
    through = f"{path}/data"
    assert " file" in refusal("prepare", "synthetic", "tiny", through, "--num_users", "5").problem
    assert " file" in refusal("demo", "--output", f"{path}/x").problem
    assert " file" in refusal("bench", "evaluations", "run", "--json", f"{path}/x.json").problem
    assert " file" in refusal("plan", "demo", "--cluster", "cpu-hosts", "--page", f"{path}/x.html").problem
    with pytest.raises(UserError, match=r"is a file|runs through the file"):
        generate(preset("tiny", num_users=5), Path(through))


def test_what_all_ranks_say_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SAID_FOLDER, str(tmp_path))
    for text in ("error: a", "error: a", "error: b"):
        say_once(text)
    assert capsys.readouterr().err == "error: a\nerror: b\n"


def test_launch_refuses_what_it_could_not_run() -> None:
    assert refusal("launch", "-n", "2").option == "launch"
    assert refusal("launch", "-n", "2", "trian", "demo").remedy == "did you mean 'train'?"
    assert refusal("launch", "-n", "2", "nothing.py").problem == "this script does not exist"


def test_option_habits_lead_to_options_that_exist() -> None:
    commands = ("train demo", "train ranking", "prepare log", "serve", "recommend")
    names = [name for command in commands for name in _field_names(config_of(command.split())[0])]
    for word, ends in _HABITS.items():
        for end in ends:
            assert any(f".{name}".endswith(f".{end}") for name in names), (word, end)


@pytest.mark.parametrize("options", ["", " --log.user customer"])
def test_prepare_without_a_format_says_to_add_log(options: str) -> None:
    error = refusal(*f"prepare shop.csv data/x{options}".split())
    assert (error.option, error.value) == ("format", "shop.csv")
    assert "the format before it is missing" in error.problem
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


def test_commands_without_words_keep_the_usual_error() -> None:
    for command in (["serve"], ["serve", "--port", "80"], ["launch", "train", "demo"], ["plan", "demo"]):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, "Missing option" in result.output) == (2, True)
    assert CliRunner().invoke(app, ["serve", "models/shop", "--help"]).exit_code == 0


def test_serve_of_a_run_says_how_to_export_it(tmp_path: Path) -> None:
    run = tmp_path / "shop"
    run.mkdir()
    (run / "config.json").write_text("{}")
    error = refusal("serve", "--model", str(run), "--port", "0")
    assert (error.value, error.problem) == (str(run), "is a run, not an exported model")
    assert error.remedy == f"export it: nestrec export {run} models/shop"


def test_options_of_auto_name_recipes_with_the_same_options() -> None:
    error = refusal("options", "train", "auto", "dropout")
    assert error.value == "auto"
    lines = re.findall(r"nestrec (options train \w+ dropout) \(\w+\)", str(error.remedy))
    assert lines[0] == "options train demo dropout"
    assert len(lines) == len(OPTIONS_OF)
    for line in lines:
        assert "dropout" in CliRunner().invoke(app, line.split()).output
