"""What a decoder remembers between calls: keys and values, recurrent states, and the last tree.

A call over a token tree writes no state. It keeps the inputs that the state update needs, and
the accepted path of that tree is replayed at the start of the next call (activation replay).
Every buffer is static and every length lives on the device, so that calls can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stree.errors import UsageError
from stree.models.config import HybridConfig
from stree_kernels import naive


@dataclass
class AttentionCache:
    """Keys and values, each (B, Hkv, slots, D); the tree's nodes sit behind the committed ones."""

    keys: Tensor
    values: Tensor

    def settle(self, length: Tensor, path: Tensor) -> None:
        """Make the accepted path's keys and values contiguous. length (B,), path (B, K)."""
        naive.move_accepted(self.keys, length, path)
        naive.move_accepted(self.values, length, path)


@dataclass
class MambaCache:
    """A state (B, H, P, S), the last conv inputs (B, W − 1, C), and the last tree's inputs."""

    state: Tensor
    tail: Tensor
    conv_inputs: Tensor  # (B, N, C), before the conv
    x: Tensor  # (B, N, Gx, P), after it
    B: Tensor  # (B, N, Gb, S)
    dt: Tensor  # (B, N, H), after softplus

    def keep(self, conv_inputs: Tensor, x: Tensor, B: Tensor, dt: Tensor) -> None:
        """Keep what replaying any path of this tree needs."""
        num_nodes = dt.shape[1]
        self.conv_inputs[:, :num_nodes] = conv_inputs
        self.x[:, :num_nodes] = x
        self.B[:, :num_nodes] = B
        self.dt[:, :num_nodes] = dt

    def settle(self, A: Tensor, path: Tensor, path_length: Tensor) -> None:
        """Advance the state along the accepted path. A (H,), path (B, K), path_length (B,)."""
        state = naive.replay(self.state, self.x, self.dt, A, self.B, path, path_length)
        self.state.copy_(state)
        self.tail.copy_(naive.conv_replay(self.tail, self.conv_inputs, path, path_length))


class HybridCache:
    """One cache a layer, the committed length, and the accepted path not yet replayed.

    Args: batch sequences of at most max_length committed tokens, trees of at most max_nodes.
    States are fp32, or fp64 in an fp64 model: in bf16 they drift over thousands of tokens.
    """

    def __init__(
        self,
        config: HybridConfig,
        max_length: int,
        max_nodes: int,
        *,
        batch: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.max_length = max_length
        self.max_nodes = max_nodes
        # Moving a path's keys touches up to max_nodes slots past the committed ones
        self.num_slots = max_length + 2 * max_nodes
        self.layers: list[AttentionCache | MambaCache] = []
        state_dtype = naive.accumulation_dtype(dtype)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        x_groups, b_groups, _ = config.scan_groups
        for layer in range(config.num_layers):
            if config.is_attention(layer):
                shape = (config.num_kv_heads, self.num_slots, config.head_dim)
                self.layers.append(AttentionCache(zeros(*shape), zeros(*shape)))
                continue
            heads, head_dim, d_state = config.num_ssm_heads, config.ssm_head_dim, config.d_state
            self.layers.append(
                MambaCache(
                    state=zeros(heads, head_dim, d_state, dtype=state_dtype),
                    tail=zeros(config.d_conv - 1, config.conv_dim),
                    conv_inputs=zeros(max_nodes, config.conv_dim),
                    x=zeros(max_nodes, x_groups, head_dim),
                    B=zeros(max_nodes, b_groups, d_state),
                    dt=zeros(max_nodes, heads, dtype=state_dtype),
                )
            )
        self.length = zeros(dtype=torch.long)  # (B,) tokens in the state
        self.path = zeros(max_nodes, dtype=torch.long)  # (B, K) nodes to replay
        self.path_length = zeros(dtype=torch.long)  # (B,) how many of them count
        self.num_committed = 0  # the host's count, the pending path included

    def reset(self) -> None:
        """Forget everything, so that the buffers serve another sequence."""
        for layer in self.layers:
            if isinstance(layer, MambaCache):
                layer.state.zero_()
                layer.tail.zero_()
        self.length.zero_()
        self.path_length.zero_()
        self.num_committed = 0

    def commit(self, path: Sequence[int]) -> None:
        """Accept a path of the last tree, root first; it is replayed by the next call.

        Raises `UsageError` when the cache is full.
        """
        self.reserve(len(path))
        self.path[:, : len(path)] = torch.tensor(list(path), device=self.path.device)
        self.path_length.fill_(len(path))
        self.num_committed += len(path)

    def reserve(self, num_tokens: int) -> None:
        """Check that as many more tokens fit."""
        if self.num_committed + num_tokens > self.max_length:
            raise UsageError(
                f"{self.num_committed} + {num_tokens} tokens do not fit a cache of "
                f"{self.max_length}; raise max_length"
            )

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        layers = [tensor for layer in self.layers for tensor in vars(layer).values()]
        return sum(each.nbytes for each in [*layers, self.length, self.path, self.path_length])
