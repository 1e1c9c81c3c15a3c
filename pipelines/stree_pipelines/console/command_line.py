"""Build the commands' parsers, so that all behave alike.

A mistake is one line that names it, and exit code 2; an option is spelt in full; the help has one
default each; shipped configs work from any folder.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, get_loader, set_loader

from stree.common.errors import StreeError, UsageError
from stree.common.errors import one_line as shortened
from stree.common.plain_data import require_plain_yaml
from stree_pipelines.console.config_files import WORDS, listed, read_yaml, require_options

_PACKAGE = Path(__file__).resolve().parents[1]
# Where configs/ ships: in a wheel with this package, in a clone at its root.
SHIPPED_ROOT = _PACKAGE if (_PACKAGE / "configs").is_dir() else _PACKAGE.parents[1]

# Lines of jsonargparse's explanations that repeat types and do not help to correct the input.
_FILLER = re.compile(
    r"(Does not validate|Subtypes:|Errors:|Given value type:|Expected a <class 'None)"
)
_ARCHITECTURES = ("model.drafter", "model.architecture")
_WANTED = re.compile(r"Expected a (?:<class '(\w+)'>|typing\.Literal\[(.*?)\])")
_GOT = re.compile(r"(?:Got|Given) value: (.*)$", re.MULTILINE)
_TYPES = {kind.__name__: words for kind, words in WORDS.items()}
_KEY = re.compile(r'(?:Parser key|Configuration key|key) "([\w.]+)"')
_UNKNOWN_KEY = re.compile(r"(?:Group '([^']+)' does|Subcommand '\w+' does|Option)\b.*?'([^']+)'")
_UNKNOWN_OPTIONS = "unrecognized arguments: "
_REQUIRED = "the following arguments are required: "
_KEY_AT_START = re.compile(r"(?:there is no option )?([\w.]+)\b")
_NO_FILE = "File does not exist: "
_NO_KEYS = {"help", "help_all", "config", "print_config"}  # options that are no keys of a YAML file
WIDTH_LEFT_FREE = 2  # characters at the right, by argparse
SUBCOMMAND = "fit"  # the only one


# The YAML file that an option comes from, by its dotted name, while a command line is parsed
_file_of_key: ContextVar[Mapping[str, str] | None] = ContextVar("file_of_key", default=None)


def typed_command() -> str:
    """Return the command line of this process, to be typed again."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return shlex.join(["python", "-m", started.parent.name, *sys.argv[1:]])
    if started.suffix == ".py":
        return shlex.join(["python", *sys.argv])
    return shlex.join([started.name, *sys.argv[1:]])


def input_path(name: str) -> str:
    """Resolve a file or folder to read: from the current folder, else from the shipped configs'
    root.

    That root is the repository's, or the installed package, so that configs work from any folder. A
    bare name is left alone: benchmarks, trees and templates have names, too.
    """
    shipped = os.path.join(SHIPPED_ROOT, name)
    is_path = os.path.dirname(name) != ""
    return shipped if is_path and not os.path.exists(name) and os.path.exists(shipped) else name


class OneLineErrors:
    """Mixin of argument parsers that prints the mistake and a hint instead of the whole usage.

    An abbreviation is refused: its meaning may change with the next option. Dashes in an option's
    name stand for underscores. A command with several required options has an `example`: a line
    that is complete.
    """

    prog: str
    example = ""
    exit_on_error: bool
    _actions: list[argparse.Action]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_args(self, *arguments: Any, **options: Any) -> Any:
        first, *more = arguments or (options.pop("args", None),)
        given: list[str] = []
        known = {name for action in self._actions_of_options() for name in action.option_strings}
        for each in sys.argv[1:] if first is None else first:
            name, equals, value = each.partition("=")
            if name.startswith("--") and name not in known:  # --max-length for --max_length
                spelt = f"--{name[2:].replace('-', '_')}"
                each = spelt + equals + value if spelt in known else each
            given += each.split("=", 1) if each.startswith("--config=") else [each]
        files: dict[str, str] = {}
        for index, each in enumerate(given[:-1]):
            if each == "--config":
                given[index + 1] = input_path(given[index + 1])
                if (path := Path(given[index + 1])).exists():
                    values = require_options(read_yaml(path), path, self._kinds())
                    files |= dict.fromkeys(values, str(path))
        files = {key: path for key, path in files.items() if f"--{key}" not in given}
        token = _file_of_key.set(files)
        try:
            return super().parse_args(given, *more, **options)  # type: ignore[misc]
        except StreeError:
            raise
        except argparse.ArgumentError:
            raise  # by `error` below, for jsonargparse
        except Exception as error:  # a file that is no text; values that jsonargparse cannot handle
            self.error(f"{type(error).__name__}: {error}", error)
        finally:
            _file_of_key.reset(token)

    def _actions_of_options(self) -> list[argparse.Action]:
        of_subcommand = getattr(getattr(self, "_subcommands_action", None), "choices", {})
        actions: list[argparse.Action] = of_subcommand.get(SUBCOMMAND, self)._actions
        return actions

    def _kinds(self) -> dict[str, Any]:
        """Return the types of the options in a YAML file; None where the parser looks at values."""
        kinds: dict[str, Any] = {}
        for action in self._actions_of_options():
            is_yaml_s = not action.dest.endswith(".help") and action.dest not in _NO_KEYS
            if is_yaml_s:
                kinds[action.dest] = {"+": list, "*": list, 0: bool}.get(action.nargs)
        return kinds

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # jsonargparse tries alternatives with parsers of its own
            raise argparse.ArgumentError(None, message) from ex
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        line = shortened(one_line(message, parser.known_options()))
        if key := _KEY_AT_START.match(line):
            file = (_file_of_key.get() or {}).get(key[1])
            line = line if file is None else f"{file}: {line}"
        if self.example and message.startswith(_REQUIRED):
            line += f", as in: {self.example}"
        print(f"error: {line}; see {program} --help", file=sys.stderr)
        sys.exit(UsageError.exit_code)

    def known_options(self) -> list[str]:
        """Return the long options as the help spells them."""
        spelt = (option for action in self._actions for option in action.option_strings)
        return [each for each in spelt if each.startswith("--") and not each.endswith("+")]


def _is_command_line(line: str) -> bool:
    """Return whether a line of a description is one to type: indented, or begun by a program."""
    return line.startswith((" ", "stree ", "python ", "accelerate ", "torchrun ", "sbatch "))


class OneDefault:
    """Mixin of help formatters: descriptions fit the terminal, and an option has one default."""

    def start_section(self, heading: str | None) -> None:
        wrapped = None if heading is None else textwrap.fill(heading, self._width)  # type: ignore[attr-defined]
        super().start_section(wrapped)  # type: ignore[misc]

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap prose; break a command line before its last option that fits."""
        width += WIDTH_LEFT_FREE
        blocks: list[str] = []
        for is_command, lines in itertools.groupby(text.splitlines(), _is_command_line):
            if not is_command:
                blocks += (textwrap.fill(each, width) for each in _paragraphs(lines))
                continue
            for line in lines:
                at = max(line.rfind(" --", 0, width - 2), 0)
                if len(line) > width and line[:at].strip():
                    line = f"{line[:at]} \\\n       {line[at:]}"
                blocks.append(line)
        return textwrap.indent("\n".join(blocks), indent)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, argparse.SUPPRESS, "", []) or action.nargs == 0
        if not action.option_strings or "default" in text or "(required)" in text:
            return text
        if action.required:
            return f"{text} (required)".lstrip()
        return text if silent else f"{text} (default: %(default)s)".lstrip()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)  # type: ignore[misc]
        names = ", ".join(each for each in action.option_strings if not each.endswith("+"))
        if action.nargs == 0:
            return names
        metavar = self._get_default_metavar_for_optional(action)  # type: ignore[attr-defined]
        return f"{names} {self._format_args(action, metavar)}"  # type: ignore[attr-defined]


class CommandHelp(OneDefault, DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help formatter of `CommandParser`."""


class PlainHelp(OneDefault, argparse.RawDescriptionHelpFormatter):
    """Help formatter of `PlainParser`."""


def _load_yaml(text: str) -> Any:
    require_plain_yaml(text)
    try:
        return _load_any_yaml(text)
    except (KeyError, TypeError, AttributeError) as error:  # a tag that does not fit its value
        raise ValueError(f"{type(error).__name__}: {error}") from error


# Runs before jsonargparse's own loader, whose recursion in C ends the process on deep nesting.
_load_any_yaml = get_loader("yaml")
set_loader("yaml", _load_yaml, exceptions=(yaml.YAMLError, ValueError))


class CommandParser(OneLineErrors, ArgumentParser):
    """Parser of a command with a YAML file of its options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": CommandHelp, **options})


class PlainParser(OneLineErrors, argparse.ArgumentParser):
    """Parser of a command with a few options."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": PlainHelp, **options})


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Join the lines of each paragraph; an empty line and an item of a list begin another."""
    paragraph: list[str] = []
    for line in lines:
        if paragraph and (not line or line.startswith("- ")):
            yield " ".join(paragraph)
            paragraph = []
        if line:
            paragraph.append(line)
        else:
            yield ""
    if paragraph:
        yield " ".join(paragraph)


def one_line(message: str, known: Iterable[str] = ()) -> str:
    """Reduce a parser's explanation to one line, which names unknown or missing options in full.

    known: the options that exist.
    """
    if message.startswith(_UNKNOWN_OPTIONS):
        word = message.removeprefix(_UNKNOWN_OPTIONS).split(" ")[0].partition("=")[0]
        if not word.startswith("-"):
            return f"{word!r} is one argument too many"
        return f"there is no option {word}{suggestion(word, known)}"
    if message.startswith(_REQUIRED):
        names = message.removeprefix(_REQUIRED).split(", ")
        return _missing([name.removeprefix(f"{SUBCOMMAND}.") for name in names])
    key = _KEY.search(message)
    unknown = re.findall(r"Option '([^']+)' is not accepted", message)
    if key and unknown:
        if key[1] in _ARCHITECTURES:
            from stree.models.config import HybridConfig  # needs torch, which not all commands load

            try:
                HybridConfig.from_dict(dict.fromkeys(unknown))
            except UsageError as error:
                return f"{key[1]}: {error}"
        return f"{key[1]} has no option {unknown[0]!r}"
    if (found := _UNKNOWN_KEY.match(message)) is not None:
        name = ".".join(part for part in found.groups() if part)
        closest = suggestion(f"--{name}", known).replace("--", "")
        return f"there is no option {name}{closest}"
    if _NO_FILE in message:
        return f"--{key[1] if key else 'config'} names no file: {message.partition(_NO_FILE)[2]}"
    if key and (got := _GOT.search(message)) is not None:
        wanted = _wanted(message)
        if got[1] == "None" and wanted in (_TYPES["str"], _TYPES["dict"]):  # without a default
            return _missing([key[1]])
        return f"{key[1]} is {'null' if got[1] == 'None' else got[1]}, wanted {wanted}"
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    return "; ".join(line.rstrip(";:") for line in lines if line and not _FILLER.match(line))


def _wanted(message: str) -> str:
    """Return the types that jsonargparse wants for a value in plain words."""
    words: list[str] = []
    for kind, choices in _WANTED.findall(message):
        words += [_TYPES.get(kind, kind)] if kind else choices.replace("'", "").split(", ")
    return listed(dict.fromkeys(each for each in words if each != "null") or [_TYPES["dict"]])


def suggestion(name: str, known: Iterable[str]) -> str:
    """Guess the option meant by an unknown one, as a question; "" without a guess.

    Tried in turn: one that it abbreviates, one of the same group, one of the same last name in
    another group, and one with a similar spelling.
    """
    group, _, leaf = name.rpartition(".")
    options = {option: option.lstrip("-").rpartition(".")[2] for option in known}
    siblings = {last: option for option, last in options.items() if option.startswith(f"{group}.")}
    close = [option for option in options if option.startswith(name)]
    close += [siblings[each] for each in get_close_matches(leaf, siblings, 1)]
    close += [option for option, last in options.items() if last == leaf.lstrip("-")]
    close += get_close_matches(name, options, 1) if not siblings else []
    return f" (did you mean {close[0]}?)" if close else ""


def _missing(names: list[str]) -> str:
    line = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing"
    dotted = next((name for name in names if "." in name), None)
    return line if dotted is None else f"{line}: give a YAML file with --config, or --{dotted} …"
