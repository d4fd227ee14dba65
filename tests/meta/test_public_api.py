"""Every public name has a docstring that `pydoc` and the reference pages can show, and complete annotations."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import nestrec
from nestrec.client import AsyncClient, Client

PUBLIC = {**{name: getattr(nestrec, name) for name in nestrec.__all__}, "Client": Client, "AsyncClient": AsyncClient}
EXAMPLES = ("Client", "Jagged", "Table", "TrainingPipeline", "UserError", "config", "evaluate", "export", "load",
            "pool_rows", "prepare", "publish", "train")  # fmt: skip
"""Names whose contract is easiest to understand from an example."""


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions, and the public methods of public classes that nestrec defines."""
    for name, value in PUBLIC.items():
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                function = getattr(member, "__func__", member)  # of a class method or a static method
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{attribute}", function
        else:
            yield name, value


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = inspect.signature(function).parameters.values()
    return [parameter for parameter in found if parameter.name not in ("self", "cls")]


def summary(value: Any) -> str:
    return (inspect.getdoc(value) or "").partition("\n\n")[0]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_summary_sentence(name: str) -> None:
    text = summary(PUBLIC[name])
    assert text.endswith("."), text
    assert text[:1].isupper() or text.startswith("`"), text
    assert len(text.split()) >= 3, text


@pytest.mark.parametrize(("name", "function"), [*functions()])
def test_public_functions_are_annotated(name: str, function: Callable[..., Any]) -> None:
    missing = [p.name for p in parameters(function) if p.annotation is inspect.Parameter.empty]
    assert missing == []
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize(("name", "function"), [(n, f) for n, f in functions() if "." not in n])
def test_public_functions_document_arguments_and_result(name: str, function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    if parameters(function):
        assert "Args:" in text
    section = text.partition("Args:")[2]
    assert [p.name for p in parameters(function) if not re.search(rf"^    \*{{0,2}}{p.name}\b", section, re.M)] == []
    if typing.get_type_hints(function).get("return") not in (None, type(None)):
        assert "Returns:" in text or "Yields:" in text


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isclass(value)])
def test_public_classes_document_constructor_arguments(name: str) -> None:
    value = PUBLIC[name]
    if dataclasses.is_dataclass(value) or getattr(value, "_is_protocol", False) or "__init__" not in vars(value):
        return  # fields have descriptions of their own
    names = [p.name for p in parameters(value.__init__) if p.kind is not inspect.Parameter.VAR_KEYWORD]
    text = (inspect.getdoc(value) or "") + (inspect.getdoc(value.__init__) or "")
    assert [n for n in names if not re.search(rf"^    \*{{0,2}}{n}\b", text, re.M)] == []


@pytest.mark.parametrize(("name", "function"), [(n, f) for n, f in functions() if "." in n])
def test_public_methods_have_a_summary_sentence(name: str, function: Callable[..., Any]) -> None:
    owner = PUBLIC[name.partition(".")[0]]
    text = summary(getattr(owner, name.partition(".")[2]))
    assert text.endswith("."), text


@pytest.mark.parametrize("name", EXAMPLES)
def test_public_names_have_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert ">>> " in text or "Example" in text, text
