"""Former names of config fields: every entry of the table refers to existing classes and fields."""

import dataclasses
import importlib
import inspect
import pkgutil
import typing

import pytest

import nestrec
from nestrec.base.renamed_fields import FORMER_NAMES, with_present_names
from nestrec.data.formats.log_format import LogOptions
from nestrec.data.prepare.prepare_options import PrepareOptions
from nestrec.tasks.ctr_task import CTRTaskConfig

UNAVAILABLE = ("__main__", "hopper", "ray", "_triton", "_kernels", "_kernel")
"""Parts of the names of modules that have no configs and whose imports need a GPU or an extra."""


@pytest.fixture(scope="module")
def dataclasses_by_name() -> dict[str, list[type]]:
    found: dict[str, list[type]] = {}
    for module in pkgutil.walk_packages(nestrec.__path__, "nestrec."):
        if any(part in module.name for part in UNAVAILABLE):
            continue
        for member in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(member) and dataclasses.is_dataclass(member):
                for base in member.__mro__:
                    if member not in found.setdefault(base.__name__, []):
                        found[base.__name__].append(member)
    return found


def field_names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_renamed_fields_exist(name: str, dataclasses_by_name: dict[str, list[type]]) -> None:
    classes = dataclasses_by_name[name]
    for former, present in FORMER_NAMES[name].items():
        first, _, rest = present.partition(".")
        for cls in classes:
            assert former not in field_names(cls), f"{former} is a field of {cls.__name__}"
            assert first in field_names(cls), f"{first} is not a field of {cls.__name__}"
            if rest:
                assert rest in field_names(typing.get_type_hints(cls)[first])


def test_renamed_fields_of_base_class_apply_to_subclasses() -> None:
    renamed = with_present_names(LogOptions, {"user_core": 3, "force": True})
    assert renamed == {"min_events_per_user": 3, "force": True}


def test_renamed_fields_can_move_into_a_section() -> None:
    moved = with_present_names(CTRTaskConfig, {"batch_rows": 64, "evaluation": {}, "loss": "bce"})
    assert moved == {"evaluation": {"batch_size": 64}, "loss": "bce"}


def test_renamed_fields_keep_duplicates() -> None:
    """The former name is then reported as an unknown field."""
    both = {"user_core": 3, "min_events_per_user": 4}
    assert with_present_names(PrepareOptions, both) == both
