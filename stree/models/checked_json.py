"""A JSON config of someone else's making, read with every doubt named."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from stree.errors import CheckpointRefused
from stree.plain_data import read_json

LARGEST = 2**31 - 1  # of a whole number in a config


class CheckedJson(Mapping[str, Any]):
    """A JSON object that knows its file, so that every refusal can name it. Null is absent.

    It also knows which keys were asked for: `refuse_unread` refuses all others.
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
        """Whether a key is there, and null: to some readers that is another thing than absent."""
        self._read.add(name)
        return name in self._given and self._given[name] is None

    def set(self, name: str, value: Any) -> None:
        """Let what another file says of a key be what this one does."""
        self._content[name] = value

    def section(self, name: str) -> CheckedJson:
        if not isinstance(self.get(name), dict):
            raise CheckpointRefused(f"{self.path} has no table {name!r}: copy it again")
        return CheckedJson(self[name], self.path)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
            raise CheckpointRefused(
                f"{self.path} has {name} = {value!r:.99}, wanted a whole number up to {LARGEST}: "
                "copy it again"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if value == {"__float__": "Infinity"}:  # transformers' spelling of what JSON lacks
            value = math.inf
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointRefused(
                f"{self.path} has {name} = {value!r:.99}, wanted a number: copy it again"
            )
        try:
            return float(value)
        except OverflowError:
            raise CheckpointRefused(
                f"{self.path} has {name} = {value!r:.99}, more than a number can be: copy it again"
            ) from None

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointRefused(
                f"{self.path} has {name} = {value!r:.99}, wanted true or false: copy it again"
            )
        return value

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise CheckpointRefused(f"{self.path} has {name} = {value!r:.99}, wanted a text")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise CheckpointRefused(f"{self.path} has {name} = {value!r:.99}, wanted texts")
        return tuple(value)

    def limits(self, name: str) -> tuple[float, float]:
        value = self.get(name, [0.0, math.inf])
        if not isinstance(value, list) or len(value) != 2:
            raise CheckpointRefused(f"{self.path} has {name} = {value!r:.99}, wanted two numbers")
        low, high = (CheckedJson({name: bound}, self.path).number(name) for bound in value)
        return low, high

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name, [])
        ids = tuple(value) if isinstance(value, list) else (value,)
        for index in ids:
            # −1 is how some configs say that there is none.
            if not isinstance(index, int) or isinstance(index, bool) or not -1 <= index <= LARGEST:
                raise CheckpointRefused(f"{self.path} has {name} = {value!r:.99}, wanted token ids")
        return tuple(index for index in ids if index >= 0)

    def require(self, name: str, wanted: Any, default: Any) -> None:
        """Refuse any value but one; null is another, for what takes null to be false."""
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
        """Refuse a key that nobody asked for and that is not known to be without effect, whatever
        its value: of a key that is not known, not even null says that it changes nothing."""
        for name, value in self._given.items():
            if name not in self._read and name not in without_effect:
                raise CheckpointRefused(
                    f"{self.path} sets {name:.99} = {value!r:.99}: unknown here; use a checkpoint "
                    "without it, or delete the key if you know that the model does without"
                )


def json_number(value: float) -> Any:
    """JSON has no infinity; transformers' spelling is read by every JSON parser."""
    return {"__float__": "Infinity"} if math.isinf(value) else value
