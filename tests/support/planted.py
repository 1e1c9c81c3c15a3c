"""Plant faults into a command's process before its script starts (`Forks.start`).

The product has no hooks for them: these functions replace what it calls. Each is given by name and
JSON arguments, since it runs in another process.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import resource
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

TRAIN_BATCH = (
    "stree_pipelines.training.checkpoints.saving:TrainingCheckpoints.on_train_batch_start"
)


def die_at(call: str, naming: str = "", when: str = "before", nth: int = 1) -> None:
    """Kill this process (SIGKILL) before or after the nth call of a function.

    Args:
        call: the function, as "module:name"; the name may be dotted.
        naming: only calls with this text in an argument count; "" counts every call.
        when: "before" or "after" the call.
    """
    _plant(call, nth, naming, **{when: lambda *_: _die()})


def fill_disk(folder: str, call: str, nth: int = 1, spare_bytes: int = 0) -> None:
    """Fill the disk of `folder` up to `spare_bytes` before the nth call of `call`."""

    def fill(*_: Any) -> None:
        disk = os.statvfs(folder)
        with open(Path(folder, "filler"), "wb") as file:
            file.write(bytes(max(0, disk.f_bavail * disk.f_frsize - spare_bytes)))

    _plant(call, nth, before=fill)


def run_out_of_memory(call: str, nth: int = 1) -> None:
    """Raise what a GPU's allocator raises when memory is full, at the nth call of `call`."""
    import torch

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
            "139.00 GiB of which 3.00 GiB is free.\nIf reserved memory is large, try …"
        )

    _plant(call, nth, before=refuse)


def refuse_memory(call: str, nth: int = 1) -> None:
    """Ask the host's allocator for more than can be addressed, at the nth call of `call`."""
    import torch

    _plant(call, nth, before=lambda *_: torch.empty(1 << 46))


def spoil_training(what: str, nth: int) -> None:
    """Put NaN into the loss, one gradient, or one weight after its update, at the nth step."""
    import torch

    def last(training: Any) -> Any:
        return [each for each in training.parameters() if each.requires_grad][-1]

    def spoil_gradient(training: Any, *_: Any) -> None:
        last(training).grad.view(-1)[0] = torch.nan

    def spoil_weight(callback: Any, trainer: Any, training: Any, *_: Any) -> None:
        with torch.no_grad():
            last(training).view(-1)[0] = torch.nan

    training = "stree_pipelines.training.module:Training"
    if what == "loss":
        _plant(f"{training}.training_step", nth, after=lambda loss: loss * torch.nan)
    elif what == "gradient":
        _plant(f"{training}.configure_gradient_clipping", nth, before=spoil_gradient)
    else:  # LogMetrics is the first callback that a finished update comes to
        callbacks = "stree_pipelines.training.run.callbacks"
        _plant(f"{callbacks}:LogMetrics.on_train_batch_end", nth, before=spoil_weight)


def spoil_rows(model: str, nth: int) -> None:
    """Put NaN into the last row of logits at the nth call: the target's, or those drafted from."""
    import torch

    def spoil(logits: Any, *_: Any) -> Any:
        logits[..., -1, :] = torch.nan
        return logits

    if model == "target":
        _plant("stree.models.model:HybridModel.tree_batch_forward", nth, after=spoil)
    else:
        _plant("stree_kernels.naive.sampling.top:choose_children", nth, before=spoil)


def pause(at_step: int) -> None:
    """Wait in this step until the run's folder has a file called "go on"."""

    def wait(checkpoints: Any, *_: Any) -> None:
        while not (checkpoints.run_dir / "go on").exists():
            time.sleep(0.01)

    _plant(TRAIN_BATCH, at_step, before=wait)


def tell(call: str, nth: int, number: int) -> None:
    """Send this process the signal `number` before the nth call of `call`."""
    _plant(call, nth, before=lambda *_: os.kill(os.getpid(), number))


def print_shares() -> None:
    """Print the share of the weights that each process of a training holds."""
    from stree_pipelines.training.parallel.sharding import own_part

    def share(model: Any) -> float:
        parameters = list(model.parameters())
        return sum(own_part(each).numel() for each in parameters) / sum(
            getattr(each, "ds_numel", each.numel()) for each in parameters
        )

    def show(training: Any) -> None:
        print(f"holds {share(training.exported):.2f} drafter, {share(training.target):.2f} target")

    distillation = "stree_pipelines.training.distillation:Distillation"
    _plant(f"{distillation}.on_train_start", 1, before=show)


def limit_files(num_bytes: int) -> None:
    """Let this process write no larger file, as `ulimit -f` does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def set_to(name: str, value: Any) -> None:
    """Give a module's constant ("module:NAME") another value."""
    module, constant = name.split(":")
    assert hasattr(importlib.import_module(module), constant)
    setattr(sys.modules[module], constant, value)


def die_inside_a_save(nth: int, line: int) -> None:
    """Kill this process (SIGKILL) inside the nth save.

    It dies when the save has executed `line` lines of stree/common/files.py.
    """
    lines: list[int] = []

    def count(saves: int, executed: int) -> None:
        if (saves, executed) == (nth, line):
            _die()

    _watch_saves(lines, count)


def count_lines_of_saves(path: str) -> None:
    """Write which lines of stree/common/files.py a run's saves execute, one number a save."""
    lines: list[int] = []

    def note(saves: int, executed: int) -> None:
        Path(path).write_text(" ".join(map(str, lines)), encoding="utf-8")

    _watch_saves(lines, note, at_each_line=False)


def _watch_saves(
    lines: list[int], at: Callable[[int, int], None], at_each_line: bool = True
) -> None:
    from stree.common import files

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != files.__file__:
            return trace if event == "call" else None
        if event == "line":
            lines[-1] += 1
            if at_each_line:
                at(len(lines), lines[-1])
        return trace

    def instead(original: Callable) -> Callable:
        def saving(*arguments: Any) -> None:
            lines.append(0)
            sys.settrace(trace)
            try:
                original(*arguments)
            finally:
                sys.settrace(None)
            if not at_each_line:
                at(len(lines), lines[-1])

        return saving

    _replace("stree_pipelines.training.checkpoints.saving:TrainingCheckpoints._save", instead)


def _plant(
    call: str, nth: int, naming: str = "", before: Callable[..., Any] = lambda *_: None,
    after: Callable[[Any], Any] = lambda result: result,
) -> None:
    """Let `before(same arguments)` run ahead of the nth call, whose result `after` changes."""

    def instead(original: Callable) -> Callable:
        numbers = itertools.count(1)

        def calling(*arguments: Any, **options: Any) -> Any:
            counts = not naming or any(naming in str(each) for each in arguments)
            is_nth = counts and next(numbers) == nth
            if is_nth:
                before(*arguments)
            result = original(*arguments, **options)
            return after(result) if is_nth else result

        return calling

    _replace(call, instead)


def _replace(call: str, instead: Callable[[Callable], Callable]) -> None:
    module, name = call.split(":")
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    setattr(owner, last, instead(getattr(owner, last)))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def edited_module(module: Any, line: str, instead: str, folder: Path) -> Any:
    """Import a copy of a module in which `line` reads `instead`.

    The copy is written to a file, because Triton reads the sources of kernels.
    """
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(line) == 1, line
    path = folder / f"planted_{module.__name__.replace('.', '_')}.py"
    path.write_text(source.replace(line, instead), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    return broken


def edited(function: Any, line: str, instead: str) -> Any:
    """Return a copy of a function, or of a method, in which `line` reads `instead`."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, line
    scope = dict(vars(sys.modules[function.__module__]))
    source = source.replace(line, instead).replace("super()", "super(type(self), self)")
    exec("from __future__ import annotations\n" + source, scope)
    return scope[function.__name__]
