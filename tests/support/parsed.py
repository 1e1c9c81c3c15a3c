"""Give a training's command line that stops once its options are parsed."""

from __future__ import annotations


class ParseOnly:
    """Loads and runs nothing: a class of such a command line inherits from it first."""

    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass
