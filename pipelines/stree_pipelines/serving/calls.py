"""Read calls of tools in the forms that the families of targets write."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|\Z)", re.DOTALL)


class Call(NamedTuple):
    """A call: the tool's name, and its arguments as JSON."""

    name: str
    arguments: str


def calls_of(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Return the calls inside a pair of marks; none if the text has none of the known forms.

    The forms are JSON (an object or a list of `name` with `arguments` or `parameters`), XML
    (`<function=NAME><parameter=KEY>VALUE`), whose values get the types of the tool's schema, and
    Python (`[name(key=value)]`).
    """
    text = text.strip()
    if "<function=" in text:
        return [_of_xml(name, inside, tools) for name, inside in _FUNCTION.findall(text)]
    try:
        return _of_json(json.loads(text))
    except (ValueError, RecursionError):
        pass
    try:
        return _of_python(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _of_json(value: Any) -> list[Call]:
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
            raise ValueError("no call")
        arguments = each.get("arguments", each.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(each["name"], arguments))
    return calls


def _of_xml(name: str, inside: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    types = _types_of(name, tools)
    arguments = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(inside)}
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def _types_of(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters") or {}
            return {
                key: schema.get("type") if isinstance(schema, Mapping) else None
                for key, schema in (parameters.get("properties") or {}).items()
            }
    return {}


def _typed(value: str, kind: Any) -> Any:
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _of_python(text: str) -> list[Call]:
    body = ast.parse(text, mode="eval").body
    found = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
    calls = []
    for each in found:
        if not isinstance(each, ast.Call) or each.args:
            raise ValueError("no call by keywords")
        arguments = {}
        for keyword in each.keywords:
            if keyword.arg is None:
                raise ValueError("no call by keywords")
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        calls.append(Call(ast.unparse(each.func), json.dumps(arguments, ensure_ascii=False)))
    return calls
