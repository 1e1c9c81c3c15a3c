"""A training's command line that stops when its options are parsed."""

from __future__ import annotations


class ParseOnly:
    """For a class of such a command line to inherit from first: nothing is loaded or run."""

    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass
