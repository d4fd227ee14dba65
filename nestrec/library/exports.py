"""A trained run for servers: as a folder, or as the newest version at an address that they follow.

    run = nestrec.train("demo", output="runs/python")
    manifest = nestrec.export(run, "models/python", {"tables": "int8"})
    nestrec.publish(run, "published/python")

Under torchrun every rank makes the same call.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestrec.base.config import with_overrides
from nestrec.base.overriding import override_texts
from nestrec.base.paths import given_path
from nestrec.library.runs import Run, folder_of
from nestrec.serving.model.export import ExportConfig, export_run
from nestrec.serving.model.spec import ServableManifest
from nestrec.serving.versions.manifest import VersionManifest
from nestrec.serving.versions.publish_run import PublishRunConfig, publish_run
from nestrec.serving.versions.reader import VersionStep


def export(
    run: Run | Path | str, output: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> ServableManifest:
    """Write a run as a servable folder, which must not exist yet; its manifest, with the version of the model.

    run: what `train` gave, or its folder. overrides: dotted names to values (`{"dtype": "bfloat16"}`; `nestrec options
    export` lists them); what fewer bits cost stands in the manifest. best: the weights of the best validation score,
    else the last ones.
    """
    cfg = with_overrides(ExportConfig(), override_texts(overrides))
    folder, written = folder_of(run), given_path(output, "output")
    return export_run(
        folder,
        written,
        best=best,
        defaults=cfg.defaults,
        search=cfg.search,
        dtype=cfg.dtype,
        tables=cfg.tables,
        prefixes=cfg.prefixes,
        device=cfg.device,
    )


def publish(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionManifest:
    """Publish a run that is not under way, in full, for servers that follow the address; the newest version there.

    run: what `train` gave, or its folder. address: a folder, or an address that fsspec knows (s3://..., gs://...).
    overrides: dotted names to values (`{"keep": 10}`; `nestrec options publish` lists them). best: the weights of the
    best validation score, else the last ones.
    """
    return publish_version(run, address, overrides, best=best).manifest


def publish_version(
    run: Run | Path | str, address: Path | str, overrides: Mapping[str, Any] | None = None, *, best: bool = True
) -> VersionStep:
    """Publish a run as `publish` does, and return the version with its name."""
    cfg = with_overrides(PublishRunConfig(), override_texts(overrides))
    folder = folder_of(run)
    given_path(address, "address")  # it is text, too, and would not survive as a path
    return publish_run(folder, str(address), cfg, best=best)
