"""Add the options that several commands share, and all those of sampling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_origin, get_type_hints

from stree.drafters.names import DRAFTERS
from stree.loading import FLOAT8, TARGET_DTYPE_HELP
from stree.tree_policy.names import TREE_POLICIES
from stree.verifiers import VERIFIERS
from stree_pipelines.console.command_line import CommandParser, PlainParser
from stree_pipelines.evaluation.benchmarks import DEFAULT_BENCHMARKS
from stree_pipelines.evaluation.plan import EvaluationSettings
from stree_pipelines.evaluation.sampling import OFF

_TYPES = get_type_hints(EvaluationSettings)
# Name and help; the sampling options are the last
OPTIONS: dict[str, str] = {
    each.name: each.metadata["help"]
    for each in sorted(fields(EvaluationSettings), key=lambda each: each.name in OFF)
    if each.metadata
} | {"dry_run": "say what it would take, and exit"}
DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in fields(EvaluationSettings) if each.default is not MISSING
} | {"benchmarks": DEFAULT_BENCHMARKS, "dry_run": False}


def add_pair(parser: PlainParser) -> None:
    """Add the target to decode with, its drafter, and how trees are made and verified."""
    add = parser.add_argument
    add("target", help="checkpoint folder, or a name on the hub")
    add("--drafter", help=f"{DRAFTERS}; a folder may be a name on the hub")
    add("--tree", help=f"{TREE_POLICIES} (default: as the drafter's profile says)")
    add("--verifier", help=f"{', '.join(VERIFIERS)} (default: as the profile says, else coupled)")
    add("--backtracking", help="replay or joint (default: as the profile says, else replay)")
    add("--target_dtype", choices=[FLOAT8], help=TARGET_DTYPE_HELP)
    add("--offload", type=int, metavar="N", help="layers of the target whose weights stay in the "
        "CPU's memory, for a GPU that cannot hold them (default: none)")


def add_options(
    parser: CommandParser | PlainParser, defaults: Mapping[str, Any], names: Iterable[str] = OPTIONS
) -> None:
    """Add the options of these names; one without a default is None unless it is given."""
    for name in names:
        default, kind = defaults.get(name), _TYPES.get(name, bool)
        is_list = get_origin(kind) is tuple
        kind = next(iter(get_args(kind)), kind)  # of each value, or of one that may be None
        if default is None and kind is not bool and isinstance(parser, CommandParser):
            kind = kind | None  # a YAML file may say null
        form: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        if is_list:
            form["nargs"], default = "+", None if default is None else list(default)
        parser.add_argument(f"--{name}", default=default, help=OPTIONS[name], **form)
