"""What the commands' parsers share: a mistake is one line that names it, and exit code 2."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, get_loader, set_loader

from stree.errors import StreeError, UsageError
from stree.errors import one_line as shortened
from stree.plain_data import require_plain_yaml

# Lines of jsonargparse's explanations that repeat types and say nothing about what to change.
_FILLER = re.compile(
    r"(Does not validate|Subtypes:|Errors:|Given value type:|Expected a <class 'None)"
)
_ARCHITECTURES = ("model.drafter", "model.architecture")


class OneLineErrors:
    """Mixin of argument parsers: instead of the whole usage, the mistake and where help is."""

    prog: str
    exit_on_error: bool

    def parse_args(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().parse_args(*arguments, **options)  # type: ignore[misc]
        except StreeError:
            raise
        except argparse.ArgumentError:
            raise  # by `error` below, for jsonargparse
        except Exception as error:  # a file that is no text; values at which jsonargparse stumbles
            self.error(f"{type(error).__name__}: {error}", error)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse tries alternatives with parsers of its own
            raise argparse.ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        print(f"error: {shortened(one_line(message))}; see {program} --help", file=sys.stderr)
        sys.exit(UsageError.exit_code)


def _load_yaml(text: str) -> Any:
    require_plain_yaml(text)
    try:
        return _load_any_yaml(text)
    except (KeyError, TypeError, AttributeError) as error:  # a tag that its value does not fit
        raise ValueError(f"{type(error).__name__}: {error}") from error


# Before jsonargparse's own loader, whose recursion in C ends the process where it is nested deep.
_load_any_yaml = get_loader("yaml")
set_loader("yaml", _load_yaml, exceptions=(yaml.YAMLError, ValueError))


class CommandParser(OneLineErrors, ArgumentParser):
    """A command with a YAML file of its options."""


class PlainParser(OneLineErrors, argparse.ArgumentParser):
    """A command of a few options."""


def one_line(message: str) -> str:
    """A parser's explanation without line breaks; an unknown key is named in full."""
    key = re.search(r'(?:Parser key|Configuration key|key) "([\w.]+)"', message)
    unknown = re.findall(r"Option '([^']+)' is not accepted", message)
    if key and unknown:
        if key[1] in _ARCHITECTURES:
            from stree.models.config import HybridConfig  # torch: nothing that all commands need

            try:
                HybridConfig.from_dict(dict.fromkeys(unknown))
            except UsageError as error:
                return f"{key[1]}: {error}"
        return f"{key[1]} has no option {unknown[0]!r}"
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    return "; ".join(line.rstrip(";:") for line in lines if line and not _FILLER.match(line))
