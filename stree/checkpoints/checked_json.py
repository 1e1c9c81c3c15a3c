"""Read a JSON config from an untrusted file, with every doubt named."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    Strict,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from stree.common.errors import CheckpointRefused
from stree.common.plain_data import read_json

LARGEST = 2**31 - 1  # of a whole number in a config
_INFINITY = {"__float__": "Infinity"}  # transformers' spelling of what JSON lacks

_Whole = Annotated[int, Strict(), Field(ge=0, le=LARGEST)]
_Number = Annotated[
    float, Strict(), BeforeValidator(lambda value: math.inf if value == _INFINITY else value)
]
_TokenId = Annotated[int, Strict(), Field(ge=-1, le=LARGEST)]  # −1: there is none
_WHOLE: TypeAdapter[int] = TypeAdapter(_Whole)
_NUMBER: TypeAdapter[float] = TypeAdapter(_Number)
_BOOLEAN: TypeAdapter[bool] = TypeAdapter(StrictBool)
_TEXT: TypeAdapter[str] = TypeAdapter(StrictStr)
_TEXTS: TypeAdapter[list[str]] = TypeAdapter(list[StrictStr])
_INDICES: TypeAdapter[list[int]] = TypeAdapter(list[Annotated[int, Strict()]])
_LIMITS: TypeAdapter[tuple[float, float]] = TypeAdapter(tuple[_Number, _Number])
_TOKEN_IDS: TypeAdapter[int | list[int]] = TypeAdapter(_TokenId | list[_TokenId])


class CheckedJson(Mapping[str, Any]):
    """A JSON object that knows its file, so that every refusal can name it; null counts as absent.

    It records the keys that were read: `refuse_unread` and `pass_over_unread` are about the others.
    `passed_over` lists the keys without effect, also those of its sections.
    """

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self._content = {name: value for name, value in content.items() if value is not None}
        self._given = dict(content)
        self._read: set[str] = set()
        self.path = path
        self.passed_over: list[str] = []

    @classmethod
    def load(cls, path: Path) -> CheckedJson:
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise CheckpointRefused(
                f"no {path.name} in {path.parent}: give the path of a checkpoint folder"
            ) from None
        except (OSError, ValueError) as error:
            raise CheckpointRefused(f"{path} cannot be read ({error}): copy it again") from error
        if not isinstance(content, dict):
            raise CheckpointRefused(f"{path} holds no JSON object: copy it again")
        return cls(content, path)

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def is_null(self, name: str) -> bool:
        """Return whether a key is there and null, which some layouts tell from an absent key."""
        self._read.add(name)
        return name in self._given and self._given[name] is None

    def set(self, name: str, value: Any) -> None:
        """Set a key to the value that another file has."""
        self._content[name] = value

    def section(self, name: str) -> CheckedJson:
        if not isinstance(self.get(name), dict):
            raise CheckpointRefused(f"{self.path} has no table {name!r}: copy it again")
        section = CheckedJson(self[name], self.path)
        section.passed_over = self.passed_over
        return section

    def _checked(self, name: str, default: Any, kind: TypeAdapter, wanted: str) -> Any:
        value = self.get(name, default)
        try:
            return kind.validate_python(value)
        except ValidationError:
            raise CheckpointRefused(
                f"{self.path} has {name} = {value!r:.99}, wanted {wanted}: copy it again"
            ) from None

    def integer(self, name: str, default: int | None = None) -> int:
        return self._checked(name, default, _WHOLE, f"a whole number up to {LARGEST}")

    def number(self, name: str, default: float | None = None) -> float:
        return self._checked(name, default, _NUMBER, "a number")

    def boolean(self, name: str, default: bool) -> bool:
        return self._checked(name, default, _BOOLEAN, "true or false")

    def text(self, name: str) -> str:
        return self._checked(name, None, _TEXT, "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._checked(name, None, _TEXTS, "a list of texts"))

    def indices(self, name: str, default: list[int] | None = None) -> list[int]:
        return self._checked(name, default, _INDICES, "a list of layer indices")

    def limits(self, name: str) -> tuple[float, float]:
        return self._checked(name, [0.0, math.inf], _LIMITS, "two numbers")

    def token_ids(self, name: str) -> tuple[int, ...]:
        ids = self._checked(name, [], _TOKEN_IDS, "token ids")
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if i >= 0)

    def require(self, name: str, wanted: Any, default: Any) -> None:
        """Refuse any value but `wanted`, null included; an absent key has the value `default`."""
        self._read.add(name)
        value = self._given.get(name, default)
        if value != wanted or isinstance(value, bool) != isinstance(wanted, bool):  # 0 is no false
            raise CheckpointRefused(
                f"{self.path} asks for {name} = {value!r:.99}; only {wanted!r} is supported"
            )

    def refuse_if_set(self, name: str, remedy: str) -> None:
        if self.get(name):
            raise CheckpointRefused(f"{self.path} sets {name} = {self[name]!r:.99}: {remedy}")

    def refuse_unread(self, without_effect: Container[str] = ()) -> None:
        """Refuse each key that was not read and that is not among those without effect."""
        self.pass_over_unread(lambda: self._given, without_effect)

    def pass_over_unread(
        self, known: Callable[[], Container[str]], without_effect: Container[str] = ()
    ) -> None:
        """Refuse each key that was not read and that the config's own class knows.

        Args:
            known: Returns the keys that the class knows; called only if a key is in doubt. Other
                keys have no effect; those that are not null join `passed_over`.
            without_effect: Known keys on which no logit depends.
        """
        names = [name for name in self._given if name not in self._read]
        for name in [name for name in names if name not in without_effect]:
            if name in known():
                raise CheckpointRefused(
                    f"{self.path} sets {name:.99} = {self._given[name]!r:.99}, which is not "
                    "supported: use a checkpoint without it, or delete the key if you know that "
                    "the model does without"
                )
            if self._given[name] is not None:
                self.passed_over.append(f"{name:.99}")


def json_number(value: float) -> Any:
    """Return a number as JSON; infinity, which JSON lacks, in the spelling of transformers."""
    return _INFINITY if math.isinf(value) else value
