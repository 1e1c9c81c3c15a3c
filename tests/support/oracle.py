"""Compute the whole decoder once more, from the maths alone: fp64 NumPy, one token at a time.

Written to be checked by reading, not to be fast, and without a line of the package: attention looks
back over a list of keys, a Mamba-2 layer carries one state and the last inputs of its convolution.
A tree is its root-to-node paths, each decoded as an ordinary sequence.

    llama   Touvron et al. 2023; rotary embedding in halves; Llama 3's frequency scaling
    mamba2  Dao and Gu 2024, the recurrence h <- exp(dt A) h + dt x B^T, y = h C + D x
    hybrid  MambaInLlama (Wang et al. 2024): x and B shared among heads as v and k are
    delta   Gated Delta Networks (Yang et al. 2025), as Qwen3-Next has them, or OLMo-Hybrid with
            negative eigenvalues: `gated_delta_step`

Dims: V vocabulary, D model width, H heads, P head dim, S state, K conv width, N tree nodes.
"""

import copy
import math

import numpy as np


def logits_of_sequence(config, weights, tokens):
    """Return logits (T, V) after each of `tokens`.

    `weights` maps parameter names to fp64 arrays.
    """
    return run(config, weights, tokens)[0]


def run(config, weights, tokens):
    """Return logits (T, V) after each of `tokens`, and the layers' states after the last.

    A state is {"keys", "values"}: lists of (kv heads, head dim), or {"ssm": (H, P, S),
    "conv_inputs": list of the last K - 1 inputs (conv channels,), oldest first}.
    """
    states = [_empty_state(config, layer) for layer in range(config.num_layers)]
    logits = [_step(config, weights, states, int(token)) for token in tokens]
    return np.stack(logits), states


def logits_of_tree(config, weights, prefix, tokens, parents):
    """Return logits (N, V) at each tree node, given the committed `prefix`.

    `tokens` (N,) and `parents` (N,), with parents[0] = -1. Each node's path from the root is
    decoded after the prefix by itself.
    """
    if len(prefix):
        _, committed = run(config, weights, prefix)
    else:
        committed = [_empty_state(config, layer) for layer in range(config.num_layers)]
    rows = []
    for node in range(len(tokens)):
        states = copy.deepcopy(committed)
        for ancestor in path_to(node, parents):
            logits = _step(config, weights, states, int(tokens[ancestor]))
        rows.append(logits)
    return np.stack(rows)


def path_to(node, parents):
    """List the nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def _empty_state(config, layer):
    if layer in config.attn_layers:
        return {"keys": [], "values": []}
    shape = (config.num_ssm_heads, config.ssm_head_dim, config.d_state)
    channels = len(_conv_input(config, *map(np.zeros, _sizes_of_x_b_c(config))))
    return {
        "ssm": np.zeros(shape),
        "conv_inputs": [np.zeros(channels) for _ in range(config.d_conv - 1)],
    }


def _step(config, weights, states, token):
    hidden = weights["model.embed_tokens.weight"][token]
    for layer, state in enumerate(states):
        name = f"model.layers.{layer}."
        normed = _rms_norm(hidden, weights[name + "input_layernorm.weight"], config.rms_norm_eps)
        if layer in config.attn_layers:
            hidden = hidden + _attention(config, weights, name + "self_attn.", normed, state)
        else:
            hidden = hidden + _mamba(config, weights, name + "mamba.", normed, state)
        if config.intermediate_size:
            scale = weights[name + "post_attention_layernorm.weight"]
            normed = _rms_norm(hidden, scale, config.rms_norm_eps)
            gate = _product(weights, name + "mlp.gate_proj", normed)
            up = _product(weights, name + "mlp.up_proj", normed)
            hidden = hidden + _product(weights, name + "mlp.down_proj", _silu(gate) * up)
    hidden = _rms_norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return weights[head] @ hidden


def _attention(config, weights, name, hidden, state):
    position = len(state["keys"])
    queries = _heads(_product(weights, name + "q_proj", hidden), config.num_heads)
    keys = _heads(_product(weights, name + "k_proj", hidden), config.num_kv_heads)
    values = _heads(_product(weights, name + "v_proj", hidden), config.num_kv_heads)
    state["keys"].append(_rotate(config, keys, position))
    state["values"].append(values)
    queries = _rotate(config, queries, position)
    outputs = []
    for head, query in enumerate(queries):
        shared = head // (config.num_heads // config.num_kv_heads)
        scores = np.array([key[shared] @ query for key in state["keys"]])
        scores = np.exp((scores - scores.max()) / math.sqrt(config.head_dim))
        mixture = scores / scores.sum()
        outputs.append(mixture @ np.stack([value[shared] for value in state["values"]]))
    return _product(weights, name + "o_proj", np.concatenate(outputs))


def _rotate(config, heads, position):
    """Turn the pair (i, i + half) of each head's entries by position * frequency i."""
    half = config.head_dim // 2
    angles = position * np.array([_frequency(config, i) for i in range(half)])
    first, second = heads[:, :half], heads[:, half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        axis=1,
    )


def _frequency(config, index):
    frequency = config.rope_theta ** (-2.0 * index / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns_in_training = scaling["original_max_position_embeddings"] * frequency / (2.0 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if turns_in_training > high:
        return frequency
    if turns_in_training < low:
        return frequency / scaling["factor"]
    kept = (turns_in_training - low) / (high - low)
    return kept * frequency + (1.0 - kept) * frequency / scaling["factor"]


def _mamba(config, weights, name, hidden, state):
    num_heads = config.num_ssm_heads
    projected = _product(weights, name + "in_proj", hidden)
    inner = num_heads * config.ssm_head_dim
    x_size, b_size, c_size = _sizes_of_x_b_c(config)
    gate, x, b, c, dt = np.split(projected, np.cumsum([inner, x_size, b_size, c_size]))

    window = [*state["conv_inputs"], _conv_input(config, x, b, c)]
    state["conv_inputs"] = window[1:]
    kernel = weights[name + "conv1d.weight"][:, 0, :]
    convolved = sum(kernel[:, tap] * window[tap] for tap in range(config.d_conv))
    if config.conv_bias:
        convolved = convolved + weights[name + "conv1d.bias"]
    convolved = _silu(convolved)
    if config.repeat_before_conv:
        x_size, b_size = inner, num_heads * config.d_state
    x, b, c = np.split(convolved, np.cumsum([x_size, b_size]))
    x = x.reshape(-1, config.ssm_head_dim)
    b = b.reshape(-1, config.d_state)
    c = c.reshape(-1, config.d_state)

    dt = np.clip(np.logaddexp(0.0, dt + weights[name + "dt_bias"]), *config.dt_limit)
    decay_rate = -np.exp(weights[name + "A_log"])
    outputs = []
    for head in range(num_heads):
        x_head = x[head * len(x) // num_heads]
        b_head = b[head * len(b) // num_heads]
        c_head = c[head * len(c) // num_heads]
        decayed = math.exp(dt[head] * decay_rate[head]) * state["ssm"][head]
        state["ssm"][head] = decayed + dt[head] * np.outer(x_head, b_head)
        outputs.append(state["ssm"][head] @ c_head + weights[name + "D"][head] * x_head)
    gated = np.concatenate(outputs) * _silu(gate)
    groups = _heads(gated, config.gated_norm_groups)
    normed = np.concatenate([_rms_norm(group, 1.0, config.gated_norm_eps) for group in groups])
    return _product(weights, name + "out_proj", normed * weights[name + "norm.weight"])


def gated_delta_step(shape, weights, projected, state):
    """Return y (H * V,) of a gated-delta layer for one token, from [z, q, k, v, a, b] as projected.

    `shape` has the numbers of heads and their dims, `weights` maps conv (C, W), conv_bias (C,),
    dt_bias and A_log (H,) to fp64 arrays. Advances `state` as `empty_gated_delta_state` makes it.
    """
    keys, values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
    sizes = [values, 2 * keys + values, shape.num_heads]
    _, inputs, a, b = np.split(projected, np.cumsum(sizes))
    window = [*state["conv_inputs"], inputs]
    state["conv_inputs"] = window[1:]
    convolved = sum(weights["conv"][:, tap] * each for tap, each in enumerate(window))
    q, k, v = np.split(_silu(convolved + weights["conv_bias"]), [keys, 2 * keys])
    q, k = _heads(q, shape.num_key_heads), _heads(k, shape.num_key_heads)
    v = _heads(v, shape.num_heads)
    decay = np.exp(-np.exp(weights["A_log"]) * np.logaddexp(0.0, a + weights["dt_bias"]))
    strength = (2.0 if shape.negative_eigenvalues else 1.0) / (1.0 + np.exp(-b))
    outputs = []
    for head in range(shape.num_heads):
        shared = head // (shape.num_heads // shape.num_key_heads)
        key = k[shared] / math.sqrt(k[shared] @ k[shared] + 1e-6)
        query = q[shared] / math.sqrt(q[shared] @ q[shared] + 1e-6) / math.sqrt(shape.key_dim)
        decayed = decay[head] * state["delta"][head]
        update = strength[head] * (v[head] - key @ decayed)
        state["delta"][head] = decayed + np.outer(key, update)
        outputs.append(query @ state["delta"][head])
    return np.concatenate(outputs)


def empty_gated_delta_state(shape):
    """Make the state before any token: {"delta": (H, K, V), "conv_inputs": list of W - 1 arrays}.

    The oldest input comes first.
    """
    channels = 2 * shape.num_key_heads * shape.key_dim + shape.num_heads * shape.value_dim
    return {
        "delta": np.zeros((shape.num_heads, shape.key_dim, shape.value_dim)),
        "conv_inputs": [np.zeros(channels) for _ in range(shape.width - 1)],
    }


def _sizes_of_x_b_c(config):
    return (
        config.num_x_groups * config.ssm_head_dim,
        config.num_b_groups * config.d_state,
        config.num_c_groups * config.d_state,
    )


def _conv_input(config, x, b, c):
    """Join [x, B, C]; with `repeat_before_conv` x and B are first copied to every head."""
    if config.repeat_before_conv:
        x = np.repeat(
            _heads(x, config.num_x_groups), config.num_ssm_heads // config.num_x_groups, 0
        )
        b = np.repeat(
            _heads(b, config.num_b_groups), config.num_ssm_heads // config.num_b_groups, 0
        )
    return np.concatenate([x.ravel(), b.ravel(), c])


def _heads(vector, count):
    return vector.reshape(count, -1)


def _rms_norm(vector, scale, eps):
    return vector / np.sqrt(np.mean(vector * vector) + eps) * scale


def _product(weights, name, x):
    """Return a layer's product with a vector, and its bias if it has one."""
    return weights[name + ".weight"] @ x + weights.get(name + ".bias", 0)


def _silu(x):
    return x / (1.0 + np.exp(-x))
