"""Read a JSON config from an untrusted file, with every doubt named."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, Field, Strict, StrictBool, StrictStr, TypeAdapter

from stree.common.errors import CheckpointRefused
from stree.common.plain_data import read_json

LARGEST = 2**31 - 1  # of a whole number in a config
_INFINITY = {"__float__": "Infinity"}  # transformers' spelling of what JSON lacks
_WITHOUT_IT = (  # a remedy
    "use a checkpoint without it, or delete the key if you know that the model does without"
)

_Number = Annotated[
    float, Strict(), BeforeValidator(lambda value: math.inf if value == _INFINITY else value)
]
_TokenId = Annotated[int, Strict(), Field(ge=-1, le=LARGEST)]  # −1: there is none
_WHOLE = TypeAdapter[int](Annotated[int, Strict(), Field(ge=0, le=LARGEST)])
_NUMBER = TypeAdapter[float](_Number)
_NUMBERS = TypeAdapter[list[float]](list[_Number])
_BOOLEAN = TypeAdapter[bool](StrictBool)
_TEXT = TypeAdapter[str](StrictStr)
_TEXTS = TypeAdapter[list[str]](list[StrictStr])
_INDICES = TypeAdapter[list[int]](list[Annotated[int, Strict()]])
_TOKEN_IDS = TypeAdapter[int | list[int]](_TokenId | list[_TokenId])


class CheckedJson(Mapping[str, Any]):
    """A JSON object that knows its file, so that every refusal can name it; null counts as absent.

    It records the keys that were read, for `refuse_unread`.
    """

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self._content = {name: value for name, value in content.items() if value is not None}
        self._given = dict(content)
        self._read: set[str] = set()
        self.path = path

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
        """Set a key, as to the value that another file has."""
        self._content[name] = self._given[name] = value

    def refuse(self, found: str, remedy: str = "use an undamaged checkpoint") -> NoReturn:
        """Raise `CheckpointRefused` that names the file, what it has, and what to do."""
        raise CheckpointRefused(f"{self.path} {found}: {remedy}")

    def section(self, name: str) -> CheckedJson:
        """Return a table of the object as one of its own."""
        if not isinstance(self.get(name), dict):
            self.refuse(f"has no table {name!r}")
        return CheckedJson(self[name], self.path)

    def _checked(self, name: str, default: Any, kind: TypeAdapter[Any], wanted: str) -> Any:
        value = self.get(name, default)
        try:
            return kind.validate_python(value)
        except ValueError:
            self.refuse(f"has {name} = {value!r:.99}, wanted {wanted}")

    def integer(self, name: str, default: int | None = None) -> int:
        return self._checked(name, default, _WHOLE, f"a whole number up to {LARGEST}")

    def number(self, name: str, default: float | None = None) -> float:
        return self._checked(name, default, _NUMBER, "a number")

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """Read as many numbers as there are in `default`."""
        numbers = self._checked(name, list(default), _NUMBERS, f"{len(default)} numbers")
        if len(numbers) != len(default):
            self.refuse(f"has {name} = {numbers!r:.99}, wanted {len(default)} numbers")
        return tuple(numbers)

    def boolean(self, name: str, default: bool) -> bool:
        return self._checked(name, default, _BOOLEAN, "true or false")

    def text(self, name: str) -> str:
        return self._checked(name, None, _TEXT, "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(self._checked(name, None, _TEXTS, "a list of texts"))

    def indices(self, name: str, default: list[int] | None = None) -> list[int]:
        return self._checked(name, default, _INDICES, "a list of layer indices")

    def token_ids(self, name: str) -> tuple[int, ...]:
        ids = self._checked(name, [], _TOKEN_IDS, "token ids")
        return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if i >= 0)

    def require(self, **wanted: Any) -> None:
        """Refuse keys with any value but the one given, null included; absent keys have it."""
        for name, only in wanted.items():
            self._read.add(name)
            value = self._given.get(name, only)
            if value != only or isinstance(value, bool) != isinstance(only, bool):  # 0 is no false
                self.refuse(
                    f"asks for {name} = {value!r:.99}; only {only!r} is supported", _WITHOUT_IT
                )

    def refuse_if_set(self, remedies: Mapping[str, str]) -> None:
        """Refuse each of some keys that is set, with its remedy."""
        for name, remedy in remedies.items():
            if self.get(name):
                self.refuse(f"sets {name} = {self[name]!r:.99}", remedy)

    def refuse_unread(
        self, without_effect: Container[str] = (),
        known: Callable[[], Container[str]] | None = None,
    ) -> None:
        """Refuse each key that was not read, has an effect, and is known to the config's own class.

        Args:
            without_effect: Known keys on which no logit depends.
            known: Returns the keys that the class knows; called only if a key is in doubt. Other
                keys have no effect. None knows all.
        """
        for name, value in self._given.items():
            read = name in self._read or name in without_effect
            if not read and (known is None or name in known()):
                self.refuse(
                    f"sets {name:.99} = {value!r:.99}, which is not supported", _WITHOUT_IT
                )


def json_number(value: float) -> Any:
    """Return a number as JSON; infinity, which JSON lacks, in the spelling of transformers."""
    return _INFINITY if math.isinf(value) else value
