"""The decoding loop: draft a tree, verify it in one target call, accept a path, commit it.

Autoregressive decoding is the tree with a root alone, vanilla speculative decoding a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from stree import threads
from stree.clock import PAUSED, PhaseClock
from stree.draft import Draft, Drafter, ModelDrafter, SamplingRule
from stree.errors import InvariantBroken, UsageError, naming_what_does_not_fit
from stree.generation import (
    DecodingStats,
    GenerationConfig,
    GenerationOutput,
    StopRule,
    not_finite,
    one_prompt,
    require_partners,
    require_room,
    require_whole,
    warn_beyond_positions,
)
from stree.graphs import CapturedTree, LastUsed
from stree.models.cache import HybridCache
from stree.models.config import HybridConfig
from stree.models.hybrid import HybridModel
from stree.sampling import Chooser, RandomChooser
from stree.steps import DeviceSteps
from stree.tokenizer import eos_token_ids
from stree.tree import TokenTree
from stree.verify import verify_greedy, verify_sampled
from stree_kernels import ops


class Target(Protocol):
    """What the loop needs of a target; `HybridModel` is one, a table of logits another."""

    config: HybridConfig

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, max_length: int, max_nodes: int) -> Any: ...

    def prefill(self, tokens: Tensor, cache: Any) -> Tensor: ...

    def tree_forward(self, tokens: Tensor, tree: TokenTree, cache: Any) -> Tensor: ...


class Decoder:
    """A target, optionally with a drafter and a tree, and the caches to decode one sequence.

    Args: drafter, a model or anything that fills trees (`Drafter`); without one, decoding is
    autoregressive. tree, the token tree (default with a drafter: the paper's). max_length, the
    longest sequence, prompt included; beyond the target's positions it warns. tokenizer, needed for
    stop strings only.
    Raises `UsageError` when target and drafter have different vocabularies, or tokenizers (by the
    fingerprints in their checkpoints' manifests).
    """

    def __init__(
        self,
        target: Target,
        drafter: HybridModel | Drafter | None = None,
        tree: TokenTree | None = None,
        *,
        max_length: int = 2048,
        tokenizer: Any = None,
    ) -> None:
        require_whole("max_length", max_length)
        warn_beyond_positions(target.config, max_length)
        if tree is None:
            tree = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        if drafter is None and tree.num_nodes > 1:
            raise UsageError(f"{tree} needs a drafter to fill it")
        if tree.num_nodes == 1:
            drafter = None  # a root alone leaves nothing to draft
        if isinstance(drafter, HybridModel):
            require_partners(target, drafter)
        with naming_what_does_not_fit(
            "lower max_length, take a smaller tree, or use bfloat16 or a larger GPU",
            f"buffers for {max_length} tokens and {tree}",
        ):
            if isinstance(drafter, HybridModel):
                drafter = ModelDrafter(drafter, max_length, tree.num_nodes)
            self.cache = target.new_cache(max_length, tree.num_nodes)
        self.target, self.drafter, self.tree = target, drafter, tree
        self.max_length, self.tokenizer = max_length, tokenizer
        self.eos_token_ids = eos_token_ids(target.config, tokenizer)
        self._random = RandomChooser(0, target.device)  # one for all graphs, seeded anew each time
        self._steps: LastUsed[SamplingRule, DeviceSteps] = LastUsed()
        self._weights: list[int] | None = None  # where they were when a generation last ended
        if isinstance(target, HybridModel) and target.device.type == "cuda":
            self._verify: Callable[[Tensor], Tensor] = CapturedTree(target, tree, self.cache)
        else:
            cache = self.cache  # holding the decoder itself would keep it until it is collected
            self._verify = lambda tokens: target.tree_forward(tokens, tree, cache)

    def generate(
        self,
        prompt_ids: Sequence[int] | Tensor,
        generation: GenerationConfig = GenerationConfig(),
        *,
        streamer: Any = None,
        choose: Chooser | None = None,
    ) -> GenerationOutput:
        """Generate after a prompt.

        Args: prompt_ids, at least one token, as a sequence or a tensor (T,) or (1, T);
        streamer, an object with `put(tokens)` and `end()` such as `transformers.TextStreamer`,
        ended after an error, too;
        choose, the source of randomness (default: seeded by generation.seed).
        Raises `UsageError` when it cannot fit or start, `InvariantBroken` on NaN logits,
        `OutOfMemory`.
        """
        stats = DecodingStats(tree_max_depth=self.tree.max_depth)
        tokens: list[int] = []
        reason = "length"
        with ExitStack() as stack:
            if streamer is not None:
                stack.callback(streamer.end)  # whatever happens: somebody may wait for it
            prompt = one_prompt(prompt_ids)
            if streamer is not None:
                streamer.put(prompt.cpu())
            stack.enter_context(ops.current(self.target.device))
            stack.enter_context(threads.for_decoding(self.target))
            stack.callback(self._remember_weights)
            stack.enter_context(
                naming_what_does_not_fit(
                    "lower max_new_tokens, take a smaller tree, or use bfloat16 or a larger GPU",
                    f"decoding after {len(prompt)} tokens with {self.tree}",
                )
            )
            for kept, reason in self._blocks(  # noqa: B007 (the last one counts)
                prompt.tolist(), generation, choose, stats
            ):
                tokens += kept
                if streamer is not None:
                    streamer.put(torch.tensor(kept))
        return GenerationOutput(tokens, reason, stats)

    @torch.no_grad()
    def _blocks(
        self,
        sequence: list[int],
        generation: GenerationConfig,
        choose: Chooser | None,
        stats: DecodingStats,
    ) -> Iterator[tuple[list[int], str]]:
        """Kept tokens call by call, with the reason to stop (empty while there is none)."""
        vocabulary = self.target.config.vocab_size
        require_room(sequence, generation, self.tree, vocabulary, self.max_length)
        self._follow_weights()
        rule, device = generation.rule, self.target.device
        if choose is None:
            self._random.reseed(generation.seed)
            choose = self._random
        stop = StopRule(generation, self.eos_token_ids, self.tokenizer)
        steps = self._device_steps(rule) if self._on_device(choose) else None
        clock = PhaseClock(device)

        self.cache.reset()
        logits = self.target.prefill(torch.tensor([sequence], device=device), self.cache)
        if self.drafter is not None:
            self.drafter.reset()
            self.drafter.catch_up(sequence)
        token = self._first_token(logits, rule, choose, sequence)
        kept, reason = stop.keep([token])
        sequence.append(token)
        stats.prefill_s = clock.start_decoding()
        yield kept, reason
        clock.mark(PAUSED)

        if steps is None:
            blocks = self._calls(sequence, rule, choose, stats, clock)
        else:
            blocks = self._calls_on_device(steps, sequence, stats, clock)
        while not reason:
            path, block = next(blocks)
            kept, reason = stop.keep(block)
            sequence += kept
            stats.num_calls += 1
            stats.num_nodes += self.tree.num_nodes
            stats.num_new_tokens += len(kept)
            num_accepted = min(len(kept), len(block) - 1)
            stats.accepted_per_call.append(num_accepted)
            stats.end_node_per_call.append(path[num_accepted])
            clock.mark("host")
            if reason:
                stats.decode_s, stats.time_ms = clock.stop(stats.num_calls)
            yield kept, reason
            clock.mark(PAUSED)

    def _calls(
        self,
        sequence: list[int],
        rule: SamplingRule,
        choose: Chooser,
        stats: DecodingStats,
        clock: PhaseClock,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The accepted path and the new tokens of one call after the other, decided on the host."""
        while True:
            draft = self._draft(sequence, rule, choose)
            clock.mark("draft")
            logits = self._verify(draft.tokens[None])[0]
            clock.mark("verify")
            path, block = self._accept(logits, draft, rule, choose, sequence, stats.num_calls)
            clock.mark("accept")
            self.cache.commit(path)
            clock.mark("commit")
            clock.end_call()
            yield path, block

    def _on_device(self, choose: Chooser) -> bool:
        """Whether whole steps run on the device, as graphs of the fused kernels."""
        if choose is not self._random or not isinstance(self._verify, CapturedTree):
            return False
        model_drafter = self.drafter is None or isinstance(self.drafter, ModelDrafter)
        return self._verify.reads_lengths_on_device and model_drafter

    def _device_steps(self, rule: SamplingRule) -> DeviceSteps:
        """The steps by this rule, captured when first asked for."""
        if rule not in self._steps:
            draft = None
            if isinstance(self.drafter, ModelDrafter):
                draft = self.drafter.capture(self.tree, rule, self._random)
            assert isinstance(self.target, HybridModel)
            self._steps[rule] = DeviceSteps(
                self.target, self.tree, self.cache, draft, rule, self._random
            )
        return self._steps[rule]

    def _calls_on_device(
        self, steps: DeviceSteps, sequence: list[int], stats: DecodingStats, clock: PhaseClock
    ) -> Iterator[tuple[list[int], list[int]]]:
        """As `_calls`, decided on the device: each call starts before the last one is read."""

        def launch() -> None:
            steps.launch(clock.mark)
            clock.end_call()

        steps.begin(sequence[-1])
        launch()
        while True:
            launch()
            finite, path, block = steps.collect()
            if not finite:
                raise self._not_finite("target or the drafter", stats.num_calls, sequence)
            yield path, block

    def _draft(self, sequence: list[int], rule: SamplingRule, choose: Chooser) -> Draft:
        if self.drafter is None:
            root = torch.tensor(sequence[-1:], device=self.target.device)
            return Draft(root, None, torch.ones((), dtype=torch.bool, device=root.device))
        return self.drafter.draft(sequence, self.tree, rule, choose)

    def _accept(
        self,
        logits: Tensor,
        draft: Draft,
        rule: SamplingRule,
        choose: Chooser,
        sequence: list[int],
        step: int,
    ) -> tuple[list[int], list[int]]:
        """The accepted path and the block of tokens it yields; waits for the device once."""
        highest, best = logits.max(-1)
        if rule.greedy:
            decided = best  # what the target would say after each node
        else:
            walked = verify_sampled(rule.law(logits), draft.laws, draft.tokens, self.tree, choose)
            decided = torch.cat(walked)
        # One copy for all that the host needs; token ids are exact in fp64
        parts = (draft.tokens, decided, highest, draft.finite.all()[None])
        packed = torch.cat([part.double() for part in parts]).tolist()
        num_nodes = self.tree.num_nodes
        tokens = [int(token) for token in packed[:num_nodes]]
        if not all(map(math.isfinite, packed[-1 - num_nodes : -1])):
            raise self._not_finite("target", step, sequence)
        if not packed[-1]:
            raise self._not_finite("drafter", step, sequence)
        choices = [int(each) for each in packed[num_nodes : -1 - num_nodes]]
        if rule.greedy:
            nodes, next_token = verify_greedy(choices, tokens, self.tree)
        else:
            *path, num_accepted, next_token = choices
            nodes = path[:num_accepted]
        return nodes, [tokens[node] for node in nodes[1:]] + [next_token]

    def _first_token(
        self, logits: Tensor, rule: SamplingRule, choose: Chooser, sequence: list[int]
    ) -> int:
        if not bool(logits.amax().isfinite()):
            raise self._not_finite("target", 0, sequence)
        return int(logits.argmax()) if rule.greedy else int(choose(rule.law(logits[0])))

    def _not_finite(self, who: str, step: int, sequence: list[int]) -> InvariantBroken:
        """Names the model, the step, and where the first value that is not finite appears."""
        models = [(name, model) for name, (model, _) in self._models().items() if name in who]
        return not_finite(who, models, step, sequence)

    def _models(self) -> dict[str, tuple[HybridModel, HybridCache]]:
        """Those with weights, by what they are here, and the caches made for them."""
        models = {}
        if isinstance(self.target, HybridModel):
            models["target"] = self.target, self.cache
        if isinstance(self.drafter, ModelDrafter):
            models["drafter"] = self.drafter.model, self.drafter.cache
        return models

    def _addresses(self) -> list[int]:
        """Where the weights are: graphs hold their addresses."""
        models = [model for model, _ in self._models().values()]
        return [weight.data_ptr() for model in models for weight in model.parameters()]

    def _remember_weights(self) -> None:
        self._weights = self._addresses()

    def _follow_weights(self) -> None:
        """Drop graphs of weights that have moved; refuse models that do not fit their caches."""
        if self._weights not in (None, self._addresses()):
            self._steps.clear()
            if isinstance(self.drafter, ModelDrafter):
                self.drafter.captured.clear()
            if isinstance(self._verify, CapturedTree):
                self._verify.captures.clear()
        for name, (model, cache) in self._models().items():
            if (model.dtype, model.device) != (cache.dtype, cache.device):
                raise UsageError(
                    f"the {name} is {model.dtype} on {model.device} by now, this decoder was made "
                    f"for {cache.dtype} on {cache.device}: make a new decoder"
                )


def generate(
    target: Target,
    prompt_ids: Sequence[int] | Tensor,
    generation: GenerationConfig = GenerationConfig(),
    *,
    drafter: HybridModel | Drafter | None = None,
    tree: TokenTree | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
) -> GenerationOutput:
    """Generate once; a `Decoder` does the same for many prompts without new buffers."""
    with ExitStack() as stack:
        if streamer is not None:
            stack.callback(streamer.end)
        prompt = one_prompt(prompt_ids)
        depth = tree.max_depth if tree is not None else TokenTree.paper().max_depth
        max_length = len(prompt) + generation.max_new_tokens + depth + 1
        decoder = Decoder(target, drafter, tree, max_length=max_length, tokenizer=tokenizer)
        stack.pop_all()  # from here on the decoder ends it
    return decoder.generate(prompt, generation, streamer=streamer)
