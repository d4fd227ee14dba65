"""Fields whose config is that of a member of a seam: `kind` names the member, ours or another package's.

    encoder: Annotated[SequenceConfig, KindOf(BACKBONES)]

Members of such a seam have an attribute `config`, a class with a field `kind: Literal["the member's name"]`.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestrec.base.errors import UserError
from nestrec.base.seam import Seam


@dataclass(frozen=True, slots=True)
class KindOf:
    """Part of a field's type: the field holds the config of some member of the seam."""

    seam: Seam[Any]

    def config(self, kind: str, *, field: str) -> type:
        """The config class of the member of this name; `field`: where the name was given."""
        cls: type = self.seam.find(kind, field=field).config
        try:
            names = typing.get_args(typing.get_type_hints(cls).get("kind")) if dataclasses.is_dataclass(cls) else ()
        except Exception as error:  # of a package that names types for its type checker alone, mostly
            problem = f"types of its config {cls.__name__} cannot be read ({type(error).__name__}: {error})"
            raise self.seam.unanswered(kind, "config", problem) from error
        if kind not in names:
            package = self.seam.package_of(kind)
            raise UserError(
                f"its config {cls.__name__} is not of this kind",
                field=f"{self.seam.group}: {kind}",
                value=kind,
                remedy=f"give {cls.__name__} of the package {package!r} the field `kind: Literal[{kind!r}] = {kind!r}`",
            )
        return cls

    def config_for(self, value: Mapping[str, Any], where: str) -> type:
        """The config class that plain data is of: the one it names, else the first that has all of its fields."""
        if "kind" in value:
            return self.config(str(value["kind"]), field=f"{where}.kind")
        for name in self.seam:
            cls = self.config(name, field=where)
            if value.keys() <= {field.name for field in dataclasses.fields(cls)}:
                return cls
        raise UserError(
            "does not say of which kind it is",
            field=where,
            value=dict(value),
            remedy=f'add "kind", one of {", ".join(self.seam)}',
        )

    def check(self, value: Any, where: str) -> None:
        """Raise where a value is no config of a member."""
        kind = getattr(value, "kind", None)
        if not (isinstance(kind, str) and kind in self.seam and isinstance(value, self.config(kind, field=where))):
            problem = f"is no config of a {self.seam.noun}"
            raise UserError(problem, field=where, value=value, remedy=f"give one of kind {', '.join(self.seam)}")
