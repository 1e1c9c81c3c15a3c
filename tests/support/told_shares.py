"""Run distill.py, and print what share of the weights each process holds."""

from __future__ import annotations

from stree.models.model import HybridModel
from stree_pipelines.training.distillation import Distillation
from stree_pipelines.training.parallel.sharding import own_part


def install() -> None:
    def tell(self: Distillation) -> None:
        print(f"holds {_share(self.exported):.2f} drafter, {_share(self.target):.2f} target")

    Distillation.on_train_start = tell


def _share(model: HybridModel) -> float:
    parameters = list(model.parameters())
    return sum(own_part(each).numel() for each in parameters) / sum(
        getattr(p, "ds_numel", p.numel()) for p in parameters
    )
