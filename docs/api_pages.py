"""Generates the reference of the Python API: one page per group of public names.

The names are listed by the path from which users import them. `mkdocstrings` renders each name from its docstring.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from markdown_text import page, table

_RENDERING = """\
    options:
      heading_level: 2
      show_root_heading: true
      show_root_full_path: true
      show_symbol_type_heading: true
      show_symbol_type_toc: true
      show_signature_annotations: true
      signature_crossrefs: true
      separate_signature: true
      line_length: 88
      merge_init_into_class: true
      docstring_section_style: table
      docstring_options: {warn_unknown_params: false}
      members_order: source
      filters: ["!^_"]
      show_labels: false
      show_if_no_docstring: false"""


@dataclass(frozen=True)
class Group:
    """Public names that one page documents."""

    title: str
    summary: str
    names: tuple[str, ...]
    """Paths from which users import the names."""


GROUPS: Mapping[str, Group] = {
    "api-train": Group(
        "Python: train",
        "Functions that train and evaluate a recipe. They correspond to the commands `nestrec train`, `nestrec eval` "
        "and `nestrec train-stream`.",
        (
            "nestrec.train",
            "nestrec.evaluate",
            "nestrec.follow",
            "nestrec.Run",
            "nestrec.Evaluation",
            "nestrec.RunConfig",
            "nestrec.training.callbacks.TrainingCallback",
            "nestrec.UserError",
        ),
    ),
    "api-data": Group(
        "Python: data",
        "Functions that write datasets, and the class that reads them. They correspond to the commands `nestrec "
        "prepare` and `nestrec append`.",
        ("nestrec.prepare", "nestrec.append", "nestrec.data.Dataset"),
    ),
    "api-models": Group(
        "Python: models",
        "Sequences of different lengths, and the models that read them. The models take embeddings as input, and do "
        "not depend on tables or ranks.",
        (
            "nestrec.Jagged",
            "nestrec.SequenceInfo",
            "nestrec.models.HSTU",
            "nestrec.models.HSTUConfig",
            "nestrec.models.FuXi",
            "nestrec.models.FuXiConfig",
            "nestrec.models.SASRec",
            "nestrec.models.SASRecConfig",
            "nestrec.models.DLRM",
            "nestrec.models.DLRMConfig",
            "nestrec.TokenPartition",
            "nestrec.ContextParallelGroup",
            "nestrec.ContextRing",
        ),
    ),
    "api-pipeline": Group(
        "Python: tables and pipeline",
        "Embedding tables and the training pipeline for a training loop and a PyTorch module of your own.",
        (
            "nestrec.Table",
            "nestrec.TrainingPipeline",
            "nestrec.PipelineCheckpoints",
            "nestrec.pool_rows",
            "nestrec.distributed.Topology",
        ),
    ),
    "api-serving": Group(
        "Python: inference and client",
        "Recommendations in a Python process, the export of models for servers, and the HTTP clients of a server. The "
        "clients need `pip install '.[client]'` in a clone.",
        (
            "nestrec.load",
            "nestrec.Recommender",
            "nestrec.ScoredItems",
            "nestrec.export",
            "nestrec.publish",
            "nestrec.client.Client",
            "nestrec.client.AsyncClient",
            "nestrec.client.UserHistory",
            "nestrec.client.RequestError",
            "nestrec.client.ServerBusyError",
        ),
    ),
    "api-plugins": Group(
        "Python: extension points",
        "Specs of plugins. A package registers a spec as an entry point of a group; `CONTRIBUTING.md` lists the "
        "groups, and `examples/plugin/` has a tested example of most of them.",
        (
            "nestrec.config",
            "nestrec.BackboneSpec",
            "nestrec.ForwardFlops",
            "nestrec.CachedForward",
            "nestrec.TaskSpec",
            "nestrec.Task",
            "nestrec.RowOptimizerSpec",
            "nestrec.ScheduleSpec",
            "nestrec.data.formats.format_spec.FormatSpec",
            "nestrec.data.streaming.stream_source.StreamSourceSpec",
            "nestrec.serving.http.endpoint_spec.EndpointSpec",
        ),
    ),
}
"""Groups by the name of their page."""


def api_pages() -> dict[str, str]:
    """Return the pages of the groups, and the page that lists all names."""
    pages = {name: _group_page(group) for name, group in GROUPS.items()}
    rows = [
        [f"[{group.title.partition(': ')[2].capitalize()}]({name}.md)", _links(name, group)]
        for name, group in GROUPS.items()
    ]
    intro = (
        "The names of the package `nestrec` itself are imported when they are first used, so that `import nestrec` "
        "does not load PyTorch. All other modules are internal and may change, except those that these pages list."
    )
    return {"api": page("# Python API", intro, table(["group", "names"], rows)), **pages}


def _group_page(group: Group) -> str:
    return page(f"# {group.title}", group.summary, *(f"::: {name}\n{_RENDERING}" for name in group.names))


def _links(page_name: str, group: Group) -> str:
    return ", ".join(f"[`{name.rpartition('.')[2]}`]({page_name}.md#{name})" for name in group.names)
