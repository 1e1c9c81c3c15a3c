"""Parse the training commands' options, and print a help of the useful ones.

--help has the command's own options first, then some of Lightning's trainer; --help_all has all.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser

from stree_pipelines.console.command_line import CommandHelp, OneLineErrors

TRAINER = "trainer."
# Replacements of Lightning's own help texts, which cover every way to use it.
HELP = {
    "config": "YAML file with any of the options below; several are merged",
    "seed_everything": "of weights and of the order of the data",
    "trainer.accelerator": "cpu, gpu or auto",
    "trainer.devices": "processes on this node, or the indices of their GPUs",
    "trainer.num_nodes": "how many nodes take part",
    "trainer.strategy": "how processes share a training: auto, ddp, fsdp2, deepspeed_stage_2 or _3",
    "trainer.precision": "32-true or bf16-mixed (default: 32-true)",
    "trainer.max_steps": "optimiser steps",
    "trainer.accumulate_grad_batches": "micro-batches in an optimiser step",
    "trainer.gradient_clip_val": "largest norm of all gradients",
    "trainer.val_check_interval": "optimiser steps between two validations",
    "trainer.limit_val_batches": "batches of a validation, 0 for none (default: all)",
    "trainer.log_every_n_steps": "optimiser steps between two rows of metrics.csv",
    "trainer.logger": "further loggers; false: none, not even metrics.csv",
    "trainer.deterministic": "the same numbers when it is run again; costs a few percent on a GPU",
    "trainer.enable_progress_bar": "a bar instead of lines (default: on a terminal)",
}
SECTIONS = {
    "trainer", "model", "model.loss", "model.optimizer", "model.architecture", "data", "export",
    "checkpoint", "evaluation",
}
# Lightning's docstrings repeat its own defaults, which do not hold here.
_OTHER_DEFAULT = re.compile(r"\s*Defaults?:? (?:to )?``.*?``\.?")


class HelpAll(argparse._HelpAction):
    """Action of --help_all: help with all options of Lightning's trainer and all YAML sections."""

    def __call__(self, parser: Any, *arguments: Any) -> None:
        parser.is_shown = lambda name: True
        super().__call__(parser, *arguments)


class TrainingParser(OneLineErrors, LightningArgumentParser):
    """Parser of a training command; `is_shown` decides by name which options --help has."""

    _action_groups: list[Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": CommandHelp, **options})
        self.is_shown: Callable[[str], bool] = is_of_use

    def format_help(self, *arguments: Any) -> str:
        actions = [action for group in self._action_groups for action in group._group_actions]
        for action in actions:
            spelt = [each for each in action.option_strings if each.startswith("--")]
            name = spelt[0].lstrip("-") if spelt else ""  # of "model.target --> data.tokenizer"
            if not name or not self.is_shown(name):
                action.help = argparse.SUPPRESS
            elif name in HELP:
                action.help = HELP[name]
            elif action.help is not None:
                action.help = _OTHER_DEFAULT.sub("", action.help)
        self._action_groups.sort(key=_is_trainer_s)  # the trainer's come last
        self._action_groups[-1].title = "Of Lightning's trainer"
        return super().format_help(*arguments)


def is_of_use(name: str) -> bool:
    """Return True for the command's own options and the useful ones of Lightning's trainer.

    Options that read a YAML file of one section are neither.
    """
    return name in HELP if name.startswith(TRAINER) else name not in SECTIONS | {"print_config"}


def _is_trainer_s(group: Any) -> bool:
    return any(action.dest.startswith(TRAINER) for action in group._group_actions)
