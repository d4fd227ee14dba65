"""Printed user errors: each one contains the invalid input and a remedy.

`python tests/unit/command/test_provoked_errors.py` prints a list of all of them.
"""

import contextlib
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestrec.base.errors import UserError
from nestrec.cli.app import app, find_command
from nestrec.cli.options_command import undotted_options

LOG = "".join(f"u{n % 7},i{n % 5},{1_600_000_000 + 86_400 * n}\n" for n in range(60))

# Each line is a command and, after `=>`, text that its message must contain: the invalid input, with the option as
# typed. Names in braces are placeholders; `prepared` returns their values.
COMMANDS = """
prepare log {dir}/missing.csv {dir}/out => missing.csv
prepare log {dir}/empty.csv {dir}/out => empty.csv
prepare log {dir}/events.csv {dir}/out --log.user user --log.item iid => --log.user=user
prepare log {dir}/events.csv {dir}/out --log.user uid --log.item item => --log.item=item
prepare log {dir}/events.csv {dir}/out {columns} --log.time when => --log.time=when
prepare log {dir}/events.csv {dir}/out {columns} --log.time ts --log.time_unit fortnights => --log.time_unit=fortnights
prepare log {dir}/events.csv {dir}/out {columns} --log.time ts --log.time_unit iso => --log.time_unit
prepare log {dir}/events.csv {dir}/out {columns} --log.actions buy => --log.actions=buy
prepare log {dir}/events.csv {dir}/out {columns} --log.actions buy=bought => bought
prepare log {dir}/events.csv {dir}/out {columns} --max_bad_fraction 2 => --max_bad_fraction=2
prepare log {dir}/events.csv {dir}/out {columns} --min_events_per_user many => --min_events_per_user=many
prepare log {dir}/events.csv {dir}/out {columns} --user_core 5 => min_events_per_user
prepare log {dir}/events.csv {dir}/out {columns} --k_core 5 => min_events_per_item
prepare log {dir}/events.csv {dir}/out {columns} --timestamp ts => log.time
prepare log {dir}/events.csv {dir}/out {columns} --delimiter ; => log.separator
prepare log {dir}/events.csv {dir}/out {columns} --items {dir}/items.csv => items.csv
prepare log {dir}/events.csv {dir}/out {columns} --log.time ts --fit_until yesterday => --fit_until=yesterday
prepare lgo {dir}/events.csv {dir}/out => lgo
prepare {dir}/events.csv {dir}/out => nestrec prepare log
prepare log {dir}/events.csv {dir}/data {columns} => --force
prepare log {dir}/bad.csv {dir}/out {columns} => --max_bad_fraction=0.01
prepare log {dir}/events.csv {dir}/out {columns} --min_events_per_user 99 => --min_events_per_user=99
prepare log {dir}/events.csv {dir}/out {columns} --final_min_events_per_user 99 => Lower --final_min_events_per_user
append {dir}/more.csv {dir}/data => more.csv
append {dir}/events.csv {dir}/nowhere => nowhere
describe {dir}/nowhere => nowhere
restore {dir}/data --generation 9 => 9
train demmo --output {dir}/run => 'demo'
train demo --data.folder {dir}/nowhere --output {dir}/run => --data.folder={dir}/nowhere
train demo --output {dir}/run --training.epochs 0 => --training.epochs=0
train demo --output {dir}/run --training.epochs ten => --training.epochs=ten
train demo --output {dir}/run --training.epoch 3 => --training.epochs
train demo --output {dir}/run --lr 1e-3 => --optimizer.learning_rate
train demo --output {dir}/run --batch_size 4 => --batch.batch_size
train demo --output {dir}/run --hidden_size 64 => --task.encoder.dim
train demo --output {dir}/run --num_workers 4 => --batch.num_workers
train demo --output {dir}/run --gradient_accumulation_steps 4 => --batch.num_micro_batches
train demo --output {dir}/run --resume true => --output
train demo --output {dir}/run --batch.batch_samples 4 => --batch.batch_size
train demo --output {dir}/run --optimizer.max_grad_norm -1 => --optimizer.max_grad_norm=-1
train demo --output {dir}/run --training.device tpu => --training.device=tpu
train demo --output {dir}/run --training.device cuda => --training.device=cuda
train demo --output {dir}/run --training.precision fp16 => --training.precision=fp16
train demo --output {dir}/run --pipeline.schedule fast => --pipeline.schedule=fast
train demo --output {dir}/run --parallel.transport nvlink => --parallel.transport=nvlink
train demo --output {dir}/run --parallel.num_replicas 2 => --parallel.num_replicas=2
train demo --output {dir}/run --batch.num_micro_batches 0 => --batch.num_micro_batches=0
train demo --output {dir}/run --task.encoder.kind bert => bert
train demo --output {dir}/run --task.loss mse => --task.loss=mse
train demo --output {dir}/run --task.evaluation.main_metric accuracy => --task.evaluation.main_metric=accuracy
train demo --output {dir}/run --tables.itms.dim 4 => 'items'
train demo --output {dir}/run --tables.items.store tape => --tables.items.store=tape
train demo --output {dir}/run --training.max_steps => --training.max_steps
train demo --output {dir}/events.csv => --output={dir}/events.csv
train demo --output {dir}/run --warm-start {dir}/nowhere => nowhere
train demo --output {dir}/run --cluster cpu-hosts => --cluster=cpu-hosts
train auto --output {dir}/run => data.folder
tune demo --output {dir}/search --search optimizer.learning_rate=1..0.5 => 1..0.5
tune demo --output {dir}/search --search dropout --num-trials 2 => dropout
tune demo --output {dir}/search --search task.encoder.dim=8,16 => --num-trials
launch -n 2 trian demo => 'train'
launch -n 2 script.py => script.py
plan demo --cluster moon => moon
eval {dir}/nowhere => nowhere
eval {dir}/nowhere --split tset => --split=tset
report {dir}/nowhere => nowhere
export {dir}/nowhere {dir}/model => nowhere
export {dir}/nowhere {dir}/model --table_dtype int4 => --table_dtype=int4
recommend {dir}/nowhere --output {dir}/recs.parquet => nowhere
embed {dir}/nowhere --output {dir}/vectors.npy --entity item => --entity=item
serve --model {dir}/nowhere => nowhere
serve --model {dir} => {dir}
serve --model {dir} --port 99999 => --port=99999
serve --model {dir} --load_balancer envoy => --load_balancer=envoy
serve --model {dir} --num_instances 3 => --num_instances=3
serve --model {dir} --kv_cache_dtype fp8 => --service.engine.kv_cache_dtype
serve --model {dir} --gpu_memory_utilization 0.9 => --service.engine.prefix_cache.device_bytes
serve --model {dir} --tensor_parallel_size 2 => index_devices
serve --model {dir} --security.tls_certificate {dir}/cert.pem => tls_private_key
serve --model {dir} --host 0.0.0.0 => --host=0.0.0.0
serve --model {dir} --history_store ftp://store => ftp://store
status 127.0.0.1:{port} => 127.0.0.1:{port}
health {dir} => {dir}
options trian => 'train'
create-key shop --file {dir}/bad.toml => bad.toml
"""


def prepared(folder: Path) -> dict[str, str]:
    """Write the files for the commands, and return the values of their placeholders."""
    (folder / "events.csv").write_text("uid,iid,ts\n" + LOG)
    (folder / "empty.csv").write_text("")
    (folder / "bad.csv").write_text("uid,iid,ts\n" + ",,\n" * 9 + "u,i,1600000000\n")
    (folder / "bad.toml").write_text("[[key]\n")
    columns = "--log.user uid --log.item iid"
    words = f"prepare log {folder}/events.csv {folder}/data {columns} --log.time ts --log.time_unit s"
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"dir": str(folder), "columns": columns, "port": str(port)}


def message_of(words: list[str]) -> str:
    """Return the error message that the command line prints."""
    result = CliRunner().invoke(app, words)
    error = result.exception
    assert isinstance(error, UserError), (words, result.output, error)
    error.name_options(words, undotted_options(find_command(words), words))
    return str(error)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def cases() -> list[tuple[str, str]]:
    return [(a.strip(), b.strip()) for a, _, b in (line.partition("=>") for line in COMMANDS.strip().splitlines())]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return prepared(tmp_path_factory.mktemp("provoked"))


@pytest.mark.parametrize(("command", "expected"), cases(), ids=[command for command, _ in cases()])
def test_error_messages_name_input_and_fix(command: str, expected: str, files: dict[str, str]) -> None:
    words = shlex.split(command.format(**files).replace(";", "\\;"))
    with inside(Path(files["dir"])):
        message = message_of(words)
    assert expected.format(**files) in message
    first, _, remedy = message.partition(": ")
    assert first, "the error names no option or argument"
    assert ". " in remedy or "?" in remedy or "\n" in remedy, "the error has no remedy"
    assert message.endswith((".", "?")), "the error is not a sentence"
    assert "Traceback" not in message


def test_error_messages_are_seventy_or_more() -> None:
    assert len(cases()) >= 70


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root, inside(Path(root)):
        names = prepared(Path(root))
        for typed, _ in cases():
            sys.stdout.write(f"$ nestrec {typed.format(**names)}\n")
            sys.stdout.write(f"error: {message_of(shlex.split(typed.format(**names).replace(';', chr(92) + ';')))}\n\n")
