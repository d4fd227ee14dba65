"""Defaults that an export names are checked against its model: one that could not be taken, or never would be, is a
mistake that is better found now than by a client.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from nestrec.base.errors import UserError, did_you_mean
from nestrec.serving.model.servable import Servable
from nestrec.serving.model.spec import ColumnSpec, InputDefaults


def check_defaults(defaults: InputDefaults, servable: Servable) -> None:
    """Raise a `UserError` that names the default."""
    if defaults.times is not None and not servable.reads_times:
        raise _unread("times", defaults.times)
    if defaults.actions is not None:
        if not servable.reads_actions:
            raise _unread("actions", list(defaults.actions))
        _check_known(defaults.actions, servable.spec.action_bits, "actions", "is no action of the model")
    _check_categories(defaults.features, servable.event_features, servable, "features")
    _check_categories(defaults.user_features, servable.user_features, servable, "user_features")
    if defaults.history is not None:
        _check_history(defaults.history, defaults, servable)


def _check_history(items: tuple[str, ...], defaults: InputDefaults, servable: Servable) -> None:
    if not items and servable.needs_event:
        remedy = "name an item: the model knows a user by nothing but events"
        raise UserError("stands for nobody", field="defaults.history", value=[], remedy=remedy)
    for key in items:
        if not servable.ids_of([key])[0]:
            remedy = "give ids of items as the log has them"
            raise UserError("is no item of the model", field="defaults.history", value=key, remedy=remedy)
    needs = {"times": servable.reads_times and defaults.times is None}
    needs["actions"] = servable.reads_actions and defaults.actions is None
    needs |= {f"features.{name}": name not in defaults.features for name in servable.event_features}
    for name, is_missing in needs.items():
        if items and is_missing:
            remedy = f"add --defaults.{name}, which the model reads of each event"
            raise UserError("needs another default", field="defaults.history", value=list(items), remedy=remedy)


def _check_categories(
    given: Mapping[str, str | None], known: Mapping[str, ColumnSpec], servable: Servable, field: str
) -> None:
    _check_known(given, known, field, "is no category that the model reads")
    for name, value in given.items():
        column = known[name]
        if value is None or column.kind == "bag":  # any text
            continue
        if column.kind == "vector":
            remedy = "leave it out, or give none: a vector that nobody knows"
            raise UserError("is no vector", field=f"defaults.{field}.{name}", value=value, remedy=remedy)
        if column.keys is not None:
            _check_known([value], set(column.keys), f"{field}.{name}", "is no value of this category")
        elif not (value.isdecimal() and 0 <= int(value) < column.num_rows):
            remedy = f"give a whole number below {column.num_rows}"
            raise UserError(
                "is no value of this category", field=f"defaults.{field}.{name}", value=value, remedy=remedy
            )


def _check_known(given: Iterable[str], known: Any, field: str, problem: str) -> None:
    for name in given:
        if name not in known:
            raise UserError(problem, field=f"defaults.{field}", value=name, remedy=did_you_mean(name, known))


def _unread(field: str, value: Any) -> UserError:
    return UserError("is not read by the model", field=f"defaults.{field}", value=value, remedy="leave it out")
