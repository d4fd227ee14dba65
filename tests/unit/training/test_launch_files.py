"""Launch files for Slurm, Kubernetes and Ray: validated by their schemas, torchrun's options and nestrec's options."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from nestrec.base.config_overrides import apply_overrides, parse_overrides
from nestrec.base.errors import UserError
from nestrec.training.recipes import recipe
from nestrec.training.run_config import RunConfig

TRAINING = Path(__file__).resolve().parents[3] / "deploy" / "training"
SLURM = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue", "no-kill",
    "open-mode",
}  # fmt: skip
"""Long options of sbatch from its manual; it does not have a schema."""


def check_torchrun(words: list[str]) -> RunConfig:
    """Parses the options of torchrun and of `nestrec train`; unknown options of either are errors."""
    parser = get_args_parser()
    args = parser.parse_args(words)
    assert args.module
    assert args.training_script == "nestrec"
    assert args.nnodes == "1:4"
    command, name, *options = args.training_script_args
    assert command == "train"
    assert options[0] == "--output"
    return apply_overrides(recipe(name), parse_overrides(options[2:]))


def jobset() -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((TRAINING / "jobset.yaml").read_text())
    return manifest


def unknown_fields(manifest: Any, parsed: Any, prefix: str = "") -> list[str]:
    """Returns the paths of a manifest that are missing after it is parsed and serialized again."""
    if isinstance(manifest, dict):
        return [
            path
            for name, value in manifest.items()
            for path in (
                unknown_fields(value, parsed[name], f"{prefix}.{name}") if name in parsed else [f"{prefix}.{name}"]
            )
        ]
    if isinstance(manifest, list):
        pairs = zip(manifest, parsed, strict=True)
        return [path for i, (a, b) in enumerate(pairs) for path in unknown_fields(a, b, f"{prefix}[{i}]")]
    return []


def test_launch_jobset_is_valid():
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # importing it takes a second

    manifest = jobset()
    parsed = JobsetV1alpha2JobSet.from_dict(manifest)
    assert parsed is not None
    assert unknown_fields(manifest, parsed.to_dict()) == []
    broken = {**manifest, "spec": {**manifest["spec"], "restarts": 3}}
    parsed_broken = JobsetV1alpha2JobSet.from_dict(broken)
    assert parsed_broken is not None
    assert unknown_fields(broken, parsed_broken.to_dict()) == [".spec.restarts"]
    (nodes,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, **nodes["template"]}
    kubernetes_validate.validate(job, "1.32", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**job, "spec": {**job["spec"], "paralelism": 4}}, "1.32", strict=True)


def test_launch_jobset_rendezvous_at_pod_zero_as_non_root():
    manifest = jobset()
    (nodes,) = manifest["spec"]["replicatedJobs"]
    pod = nodes["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    cfg = check_torchrun(container["args"])
    assert cfg.training.checkpoint_async
    endpoint = next(word for word in container["args"] if word.startswith("--rdzv-endpoint="))
    name, subdomain = manifest["metadata"]["name"], manifest["spec"]["network"]["subdomain"]
    assert (
        endpoint == f"--rdzv-endpoint={name}-{nodes['name']}-0-0.{subdomain}:{container['ports'][0]['containerPort']}"
    )
    assert pod["securityContext"]["runAsNonRoot"]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_launch_slurm_script_is_valid_for_torchrun_and_nestrec():
    path = TRAINING / "slurm.sbatch"
    text = path.read_text()
    subprocess.run(["bash", "-n", path], check=True, timeout=20)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.M)
    assert set(options) <= SLURM
    assert text.index("#SBATCH") < text.index("set -e"), "sbatch ignores options after the first command"
    command = re.sub(r"\\\n", " ", text[text.index("srun ") :])
    words = shlex.split(command.replace("$SLURM_NNODES", "4").replace("${RECIPE:-demo}", "demo"))
    cfg = check_torchrun(words[words.index("torchrun") + 1 :])
    assert cfg.training.checkpoint_every_steps == 500
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


def test_launch_ray_script_parses_train_options():
    """The Ray API is tested in tests/with_ray, where Ray is installed."""
    spec = importlib.util.spec_from_file_location("ray_train", TRAINING / "ray_train.py")
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    usage = file.__doc__.partition("ray_train.py")[2].partition("\n\n")[0]
    words = shlex.split(usage.replace("\\\n", " "))
    args, overrides = file.read(words)
    assert (args.recipe, args.workers, args.device) == ("demo", "8:32", "cuda")
    cfg = apply_overrides(recipe(args.recipe), overrides)
    assert cfg.training.checkpoint_async
    assert cfg.training.device == "cuda"
    with pytest.raises(UserError, match=r"training\.epoch="):
        file.read([*words, "--training.epoch", "2"])
