"""Checks of requests, and of target and drafter as a pair: one sentence for each refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stree import verifiers
from stree.batching.sequences import Request, SampleRequest
from stree.common.errors import InvariantBroken, UsageError
from stree.drafters import Drafter, DrafterSpec
from stree.engine.sequence import RunningSequence
from stree.engine.stop_rule import StopRule
from stree.generation import DecodingStats, GenerationConfig, require_whole
from stree.models.config import HybridConfig
from stree.models.hidden_states import require_features_of
from stree.models.model import HybridModel
from stree.prompts import one_list_of_ids
from stree.settings import settings_of
from stree.tree_policy.policy import FixedTree, TreePolicy
from stree.trees.token_tree import StepTree, as_tree
from stree.verifiers import Verifier


@dataclass(frozen=True)
class RequestLimits:
    """Models and limits that the requests of a decoder are held against.

    Attributes:
        target: Config of the target.
        drafter: Fills the trees; None decodes without drafts.
        verifier: Accepts or rejects the drafts.
        tree_policy: Chooses the trees of requests that name none.
        max_length: Tokens of the longest sequence.
        max_nodes: Nodes of the largest tree of any request.
        num_drafted: Tokens that the drafter chooses among.
        eos_token_ids: Tokens that end an answer.
        tokenizer: Finds stop strings; None where no request may have any.
    """

    target: HybridConfig
    drafter: Drafter | None
    verifier: Verifier
    tree_policy: TreePolicy
    max_length: int
    max_nodes: int
    num_drafted: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any


def checked_sequence(limits: RequestLimits, request: Request) -> RunningSequence:
    """Return the host's record of a request.

    Raises `UsageError` if it cannot be served.
    """
    if not isinstance(request, Request):
        raise UsageError(
            f"a request is a {type(request).__name__}, wanted stree.Request(prompt_ids, …)"
        )
    prompt, policy = one_list_of_ids(request.prompt_ids), limits.tree_policy
    if request.tree is not None:
        policy = FixedTree(as_tree(request.tree))
        _require_dynamic_trees_of(limits.tree_policy, policy)
    tree = policy.largest if len(policy.trees) == 1 else None
    generation = settings_of(request.generation).after(prompt).seeded()
    generation.warn_of_unread()
    if generation.num_return_sequences > 1:
        raise UsageError(
            f"num_return_sequences is {generation.num_return_sequences}, and a row has one "
            "answer: generate serves the request, or admit one for each answer"
        )
    deepest = policy.deepest
    if tree is not None and tree.num_nodes > limits.max_nodes:
        raise UsageError(
            f"{tree} has {tree.num_nodes} nodes, the decoder was made for {limits.max_nodes}: "
            "give it max_nodes"
        )
    if deepest.num_nodes > 1 and limits.drafter is None:
        raise UsageError(f"{deepest} needs a drafter to fill it")
    for each in policy.trees:
        verifiers.require_tree(
            limits.verifier, each, limits.drafter.drawn if limits.drafter else None
        )
        if each.widest > (most := limits.num_drafted):
            raise UsageError(f"{each} has {each.widest} siblings for {most} tokens")
    require_room(prompt, generation, deepest, limits.target, limits.max_length)
    stop = StopRule(generation, limits.eos_token_ids, limits.tokenizer)
    stats = DecodingStats(tree_max_depth=deepest.max_depth)
    shared = request.shared if isinstance(request, SampleRequest) else None
    num_to_keep = len(prompt) if request.messages_end is None else request.messages_end
    require_whole("messages_end", num_to_keep, least=0)
    if num_to_keep > len(prompt):
        raise UsageError(
            f"messages_end is {num_to_keep}, wanted at most the prompt's {len(prompt)} tokens"
        )
    num_to_keep *= request.keep_prompt
    return RunningSequence(prompt, generation, tree, num_to_keep, stop, stats, shared)


def _require_dynamic_trees_of(decoder: TreePolicy, asked: TreePolicy) -> None:
    """Raise `UsageError` if a request's tree does not fit a decoder with dynamic trees.

    In a step all rows have the same dynamic tree, or none has one. So no request of a decoder with
    dynamic trees may name a tree, and no request may bring a dynamic tree of its own.
    """
    grow = any(each.grows for each in (*asked.trees, *decoder.trees))
    if grow and asked.trees != decoder.trees:
        raise UsageError(
            f"a request asks for {asked}, the decoder was made with "
            f"{', '.join(each.name for each in decoder.trees)}: dynamic trees are the decoder's, "
            "the same for all its requests"
        )


def require_fillable(drafter: Any, verifier: Verifier, trees: Iterable[StepTree]) -> None:
    """Raise `UsageError` when a drafter or a verifier cannot take one of the trees."""
    if drafter is not None and not isinstance(drafter, Drafter):
        raise UsageError(f"a drafter is {drafter!r:.60}, wanted a model, n-grams or a Drafter")
    if drafter is not None and drafter.reads_alongside and None in (drafter.model, drafter.cache):
        raise UsageError(
            f"{type(drafter).__name__} reads alongside the target without a model and a cache of "
            "its own: give it both, or leave reads_alongside False"
        )
    verifiers.require_fit(verifier, drafter)
    for each in trees:
        verifiers.require_tree(verifier, each, drafter.drawn if drafter is not None else None)
        if each.grows and not (drafter is not None and drafter.grows):
            raise UsageError(
                f"{type(drafter).__name__} fills trees of one shape, {each} needs a model "
                "whose siblings are no two alike, and grows by their probabilities: take "
                "paper, chain-N or png-N-D"
            )


def require_room(
    prompt: Sequence[int], generation: GenerationConfig, tree: StepTree, target: HybridConfig,
    max_length: int,
) -> None:
    """Raise `UsageError` when a request does not fit a decoder for max_length tokens.

    It is also raised for a request beyond the target's positions, or with tokens that the target
    does not have.
    """
    vocabulary, positions = target.vocab_size, target.num_positions
    num_tokens = len(prompt) + generation.max_new_tokens
    needed = num_tokens + tree.max_depth + 1
    if positions is not None and num_tokens > positions:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens and max_new_tokens = {generation.max_new_tokens} "
            f"need {num_tokens} positions, the target was made for {positions}: shorten one, or "
            "raise max_position_embeddings in the target's config.json where it is known to go on"
        )
    if needed > max_length:
        raise UsageError(
            f"a prompt of {len(prompt)} tokens, max_new_tokens = {generation.max_new_tokens} and a "
            f"tree of depth {tree.max_depth} need a max_length of {needed}, the decoder was built "
            f"with {max_length}"
        )
    beyond = [each for each in (min(prompt), max(prompt)) if not 0 <= each < vocabulary]
    if beyond:
        raise UsageError(
            f"the prompt has the token {beyond[0]}, wanted 0 to {vocabulary - 1}: encode it with "
            "the target's own tokenizer"
        )
    for name, tokens in generation.named_tokens.items():
        beyond = [each for each in tokens if not 0 <= each < vocabulary]
        if beyond:
            has = "is" if name == "eos_token_id" else "has"
            raise UsageError(
                f"{name} {has} {beyond[0]}, wanted 0 to {vocabulary - 1}: name one of the target's "
                "own tokens"
            )


def _require_target(target: Any) -> None:
    """Raise `UsageError` for what cannot be decoded with: a name, a model of another library."""
    if not hasattr(target, "tree_batch_forward"):
        raise UsageError(
            f"the target is a {type(target).__name__}, wanted a stree.HybridModel: "
            "stree.load(folder) makes a decoder with one"
        )
    if isinstance(target, HybridModel) and target.config.feature_layers:
        raise UsageError(
            "the target reads features of a target of its own, as drafters do: name the model that "
            "it was distilled from"
        )


def require_partners(target: Any, drafter: Any) -> int:
    """Return how many tokens a drafter chooses among.

    Raises `UsageError` for a target that cannot be decoded with, and when the drafter's model was
    not made for this target, or is elsewhere.
    """
    _require_target(target)
    drafter = drafter.partner if isinstance(drafter, DrafterSpec) else None  # or made already
    if drafter is None:
        return target.config.vocab_size
    require_vocabulary_of(drafter.config, target.config)
    if drafter.config.feature_layers and not isinstance(target, HybridModel):
        raise UsageError(
            f"the drafter reads features of a HybridModel, the target is a "
            f"{type(target).__name__}: draft with a model that reads tokens alone"
        )
    require_features_of(drafter.config, target.config)
    if target.device != drafter.device:
        raise UsageError(
            f"the drafter is on {drafter.device}, the target on {target.device}: move one "
            "to the other"
        )
    hashes = (getattr(target, "tokens_sha256", None), drafter.tokens_sha256)
    if all(hashes) and hashes[0] != hashes[1]:
        raise UsageError(
            "drafter and target have different tokenizers of the same size; "
            "draft with a model distilled from this target"
        )
    return drafter.config.head_size


def require_vocabulary_of(drafter: HybridConfig, target: HybridConfig) -> None:
    """Raise `UsageError` when a drafter has another number of tokens than a target."""
    wanted, got = target.vocab_size, drafter.vocab_size
    if wanted != got:
        raise UsageError(
            f"the drafter's vocabulary has {got} tokens, the target's {wanted}; "
            "draft with a model distilled from this target"
        )


def not_finite(
    who: str, models: Iterable[tuple[str, HybridModel, Any]], sequence: RunningSequence
) -> InvariantBroken:
    """Return an error that names a model, the step and its first value that is not finite.

    Args:
        who: Name of the model.
        models: The step's, as `Step.models` returns them.
        sequence: Its tokens are those that the model has met.
    """
    where = ""
    for name, model, _ in models:
        if name == who and (found := model.first_non_finite(sequence.tokens)):
            where = f": {found}"
    return InvariantBroken(
        f"the {who}'s logits are not finite at decoding step {sequence.stats.num_calls}{where}; "
        "check the checkpoint, or run it in float32"
    )
