"""Layers whose weights lie in the CPU's memory and are copied to the GPU one ahead of their use.

A GPU then holds a model whose weights do not fit in its memory. A call takes as long as the copies
do, so a tree of many nodes costs little more than one token (DySpec, Section 6.3).

A streamed layer's weights are views of one of two buffers on the GPU, the same one in each call. So
kernels and captured graphs find them where they always were; only their values come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Never, cast

import torch
from torch import Tensor, nn

from stree.common.errors import UsageError
from stree.models.layers.layer import Layer
from stree.models.layers.mlp import Experts
from stree.models.model import HybridModel

NUM_BUFFERS = 2  # the weights that are read, and those that are copied meanwhile
_ALIGNMENT = 256  # bytes, as PyTorch's allocator


@dataclass
class _Streamed:
    """A layer's weights in the CPU's memory.

    Attributes:
        host: All weights that are streamed, as bytes, pinned if they go to a GPU.
        run: The layer's own `run`.
        copied: Event of the last copy to the GPU; None on a CPU.
    """

    host: Tensor
    run: Callable[..., Any]
    copied: Any = None


@dataclass
class Offload:
    """The streamed layers of a model, in order, and the buffers on its device that they share.

    Attributes:
        layers: Streamed layers.
        buffers: Bytes (n,) on the device.
        is_copying: False while nothing is copied, to time a call without copies.
        stream: CUDA stream of the copies; None on a CPU.
    """

    layers: list[_Streamed]
    buffers: list[Tensor]
    is_copying: bool = True
    stream: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes that each call copies."""
        return sum(len(each.host) for each in self.layers)

    def run(self, number: int, *arguments: Any) -> Any:
        """Run a streamed layer when its weights are there; then copy a later layer's."""
        if number == 0:
            for each in range(min(NUM_BUFFERS, len(self.layers))):
                self._copy(each)
        layer = self.layers[number]
        if layer.copied is not None:
            torch.cuda.current_stream().wait_event(layer.copied)
        result = layer.run(*arguments)
        if number + NUM_BUFFERS < len(self.layers):
            self._copy(number + NUM_BUFFERS)
        return result

    def _copy(self, number: int) -> None:
        """Begin to copy a layer's weights, after all that the device was asked until now."""
        layer, buffer = self.layers[number], self.buffers[number % NUM_BUFFERS]
        if not self.is_copying:
            layer.copied = None
        elif self.stream is None:
            buffer[: len(layer.host)].copy_(layer.host)
        else:
            self.stream.wait_event(torch.cuda.current_stream().record_event())
            with torch.cuda.stream(self.stream):
                buffer[: len(layer.host)].copy_(layer.host, non_blocking=True)
                layer.copied = self.stream.record_event()

    def copy_all(self) -> None:
        """Copy all layers, and let the device wait for the last."""
        for number, layer in enumerate(self.layers):
            self._copy(number)
            if layer.copied is not None:
                torch.cuda.current_stream().wait_event(layer.copied)

    def refuse(self, *_: Any) -> Never:
        """Raise `UsageError` where the weights of all layers would be read at once."""
        raise UsageError(
            "some of the model's layers are streamed from the CPU's memory, so it can be neither "
            "copied nor saved: load it without offload"
        )

    __deepcopy__ = __reduce_ex__ = refuse

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Copy nothing inside the block, so that calls take the computation's time alone."""
        self.is_copying = False
        try:
            yield
        finally:
            self.is_copying = True


@torch.no_grad()
def stream_layers(model: HybridModel, num_layers: int, device: torch.device | str) -> Offload:
    """Move a model to a device, but keep the products' weights of some layers in the CPU's memory.

    Args:
        model: Where all of it fits, on a CPU usually.
        num_layers: Layers to stream, spread evenly over the model; shared blocks stay.
        device: The device to decode on.

    Raises:
        UsageError: When the model does not have as many layers.
    """
    layers = cast(list[Layer], list(model.model.layers))
    if not 1 <= num_layers <= len(layers):
        raise UsageError(
            f"offload is {num_layers}, wanted 1 to {len(layers)}: the number of the target's "
            "layers whose weights stay in the CPU's memory"
        )
    device = torch.device(device)
    chosen = {number * len(layers) // num_layers for number in range(num_layers)}
    streamed: list[_Streamed] = []
    taken: list[list[_Place]] = []
    for index, layer in enumerate(layers):
        layer.to(device)
        if index in chosen:
            layer.pack()
            host, places = _taken(layer)
            taken.append(places)
            streamed.append(_Streamed(host, layer.run))
    longest = [
        max(map(len, (each.host for each in streamed[buffer::NUM_BUFFERS])), default=0)
        for buffer in range(NUM_BUFFERS)
    ]
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in longest]
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    result = Offload(streamed, buffers, stream=stream)
    for number, places in enumerate(taken):
        for place in places:
            place.move_to(buffers[number % NUM_BUFFERS])
    for number, index in enumerate(sorted(chosen)):
        layers[index].run = partial(result.run, number)  # type: ignore[method-assign]
    model.to(device)
    model.pack()
    model.offload = result
    model.register_state_dict_pre_hook(result.refuse)
    return result


@dataclass
class _Place:
    """Place of a weight among the bytes of its layer."""

    weight: Tensor
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def move_to(self, buffer: Tensor) -> None:
        """Make the weight a view of a buffer."""
        offset = self.offset // self.weight.element_size()
        empty = torch.empty(0, dtype=self.weight.dtype, device=buffer.device)
        self.weight.data = empty.set_(buffer.untyped_storage(), offset, self.shape, self.strides)


def _taken(layer: Layer) -> tuple[Tensor, list[_Place]]:
    """Copy the weights of a layer's products to the CPU, and free them.

    Other weights stay: scales of weights in 8 bits are few; convs, A and dt's biases are read after
    the layer, when accepted paths are replayed.

    Returns the bytes, and the place of each weight in them.
    """
    parts = [part for block in layer.blocks for part, _ in layer.parts(block)]
    weights = [weight for part in parts for each in part.packed for weight in each.weights]
    tensors = [each if isinstance(each, Tensor) else each.values for each in weights]
    for module in layer.modules():
        tensors += [module.weight] if isinstance(module, nn.Linear) else []
        tensors += [module.up, module.down] if isinstance(module, Experts) else []
    by_storage: dict[int, list[Tensor]] = {}
    for tensor in {id(each): each for each in tensors}.values():
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    places: list[_Place] = []
    offset = 0
    sources: list[tuple[int, Tensor]] = []
    for of_storage in by_storage.values():
        storage = of_storage[0].untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        sources.append((offset, raw))
        for tensor in of_storage:
            start = offset + tensor.storage_offset() * tensor.element_size()
            places.append(_Place(tensor, int(start), tuple(tensor.shape), tensor.stride()))
        offset += -(-len(raw) // _ALIGNMENT) * _ALIGNMENT
    is_on_gpu = bool(sources) and sources[0][1].is_cuda
    host = torch.zeros(offset, dtype=torch.uint8, pin_memory=is_on_gpu)
    for start, raw in sources:
        host[start : start + len(raw)].copy_(raw)
    for place in places:
        place.weight.data = place.weight.new_empty(0)
    return host, places
