"""Speculative decoding of a model that transformers has loaded, by its own `generate`.

transformers itself reads the arguments, by its own rules and defaults, and hands over prompts,
logits processors and stopping criteria; only the loop over tokens is ours.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from stree.batching.batch_decoder import BatchDecoder
from stree.batching.memory_report import MemoryReport
from stree.batching.sequences import Request, SampleRequest
from stree.batching.serve import Served
from stree.batching.step_timing import length_to_time
from stree.checkpoints.shared_weights import shared_model
from stree.common.errors import UsageError
from stree.common.words import described, placed
from stree.drafters import Drafter, DrafterSpec
from stree.drafters.names import DrafterName
from stree.engine.sequence import SharedPrompt
from stree.generation import GenerationConfig, GenerationOutput, require_whole
from stree.loading import checkpoint_folder
from stree.logits.hf_processors import CalledForRow, settings_of
from stree.models.joint import require_backtracking
from stree.models.model import HybridModel
from stree.models.packing import versions_of
from stree.prompts import prompts_of
from stree.settings import end_of, refuse
from stree.tree_policy.names import as_tree_policy
from stree.tree_policy.policy import TreePolicy
from stree.trees.token_tree import StepTree, TokenTree
from stree.verifiers import Verifier, named

_PLAIN = {  # what else asks for another search, or another answer
    "num_beams": 1, "penalty_alpha": 0.0, "prompt_lookup_num_tokens": 0, "dola_layers": None,
    "constraints": None, "force_words_ids": None, "token_healing": False,
    "return_dict_in_generate": False, "synced_gpus": False,
}
_INSTEAD = {
    "assistant_model": "the drafter of stree.from_transformers(model, drafter) drafts",
    "prompt_lookup_num_tokens": "stree.from_transformers(model, 'ngram:3') drafts by n-grams",
    "return_dict_in_generate": "the ids are returned; leave it out",
    "inputs_embeds": "give token ids",
    "seed": "torch.manual_seed repeats an answer",
}
LENGTH_STEP = 256  # of the buffers, so that prompts of other lengths find them large enough
_KEPT = "_stree_decoder"
# Arguments of transformers' generate that are neither settings nor its model's
_TAKEN = ("inputs", "input_ids", "attention_mask", "generation_config", "stopping_criteria",
          "logits_processor", "prefix_allowed_tokens_fn", "tokenizer")


def from_transformers(
    model: Any, drafter: Any = None, tree: StepTree | TreePolicy | str | None = None,
    *, verifier: str | Verifier = "coupled", backtracking: str = "replay", num_prefixes: int = 0,
) -> TransformersDecoder:
    """Return a decoder whose `generate` takes the arguments of `model.generate`, with drafts.

    All other settings are the model's own, or come with each call of `generate`.

    Args:
        model: A model of any supported family, loaded by transformers on one device. Its tensors
            are shared (`stree.checkpoints.shared_weights`).
        drafter: A name that `stree.load` takes (a folder, one on the hub, n-grams, `top:FOLDER`),
            or a model of ours or of transformers. None decodes without drafts.
        tree: A tree, a tree policy, or a name of either, as in `stree.load`. None is the paper's
            tree with a drafter, else the root alone.
        verifier: A name (`stree.verifiers.named`), or a verifier of your own.
        backtracking: "replay" or "joint", as in `BatchDecoder`.
        num_prefixes: Prefixes to keep, as in `BatchDecoder`; they are forgotten when a call needs
            larger buffers than those before.

    Raises:
        UsageError: When model, drafter and tree do not fit.
        CheckpointRefused: For a model of no known family.

    Example:
        >>> import stree, torch, transformers
        >>> sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, eos_token_id=None)
        >>> decoder = stree.from_transformers(transformers.LlamaForCausalLM(config).eval())
        >>> decoder.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """
    target = shared_model(model)
    tree = None if tree is None else as_tree_policy(tree)  # before a drafter is loaded
    return TransformersDecoder(
        model, target, _drafter(drafter, target, model), tree, verifier,
        backtracking=backtracking, num_prefixes=num_prefixes,
    )


def _require_tensor(ids: Any) -> None:
    """Raise `UsageError` for prompts that `model.generate` does not take."""
    if ids is None or isinstance(ids, Tensor):
        return
    unpacked = ": generate(**batch) takes a tokenizer's" if isinstance(ids, Mapping) else ""
    raise UsageError(
        f"the prompts are a {type(ids).__name__}, wanted a tensor (B, T) of token ids{unpacked}"
    )


def _drafter(
    given: Any, target: HybridModel, theirs: Any
) -> HybridModel | DrafterSpec | Drafter | None:
    if isinstance(given, str | os.PathLike):
        name, of_target = DrafterName.parse(given), Path()
        if name.folder is not None:
            name = replace(name, folder=checkpoint_folder(name.folder))
        if name.is_head:
            if not theirs.config.name_or_path:
                raise UsageError(
                    f"the drafter {given!r} is a head of the model's checkpoint, and this model "
                    "was not loaded from one: load it by from_pretrained"
                )
            commit = getattr(theirs.config, "_commit_hash", None)
            of_target = checkpoint_folder(theirs.config.name_or_path, commit, mtp=name.mtp)
        return name.make(name.load(of_target, target.device, target.dtype), None, target)
    is_ours = isinstance(given, HybridModel | DrafterSpec | Drafter)  # not transformers' model
    return given if given is None or is_ours else shared_model(given)


class TransformersDecoder:
    """Decoder of a model of transformers, with the same weights as `target`, and a drafter.

    Attributes:
        outputs: Output of the last `generate` for each prompt: tokens, and statistics such as τ.
    """

    def __init__(
        self, model: Any, target: HybridModel,
        drafter: HybridModel | DrafterSpec | Drafter | None = None,
        tree: StepTree | TreePolicy | str | None = None,
        verifier: str | Verifier = "coupled", *, backtracking: str = "replay",
        num_prefixes: int = 0,
    ) -> None:
        self.model, self.target, self.drafter = model, target, drafter
        self._made_of = _Weights(model)
        default = TokenTree.chain(0, "root") if drafter is None else TokenTree.paper()
        self.tree_policy, self.verifier = as_tree_policy(tree or default), named(verifier)
        self.tree, self._max_depth = self.tree_policy.largest, self.tree_policy.deepest.max_depth
        self.backtracking = require_backtracking(backtracking)
        require_whole("num_prefixes", num_prefixes, least=0)
        self.num_prefixes = num_prefixes
        if drafter is None and self._max_depth:
            raise UsageError(f"{tree} needs a drafter to fill it")
        self.outputs: list[GenerationOutput] = []
        self._batch: BatchDecoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batch": None}  # a copy makes buffers of its own

    def __repr__(self) -> str:
        models = described(self.target, self.drafter, self.tree_policy)
        return f"TransformersDecoder({models}, {placed(self.target)})"

    @property
    def room(self) -> MemoryReport | None:
        """Report of the last call's buffers and of the free memory; None before the first call.

        A call with more sequences, or longer ones, makes larger buffers.
        """
        return None if self._batch is None else self._batch.room

    def generate(
        self, inputs: Any = None, generation_config: Any = None, **arguments: Any
    ) -> Tensor:
        """Generate as `model.generate` does, from the same arguments.

        Greedy decoding gives the same tokens. Sampling follows the same distribution; seeds come
        from PyTorch's generator, so `torch.manual_seed` repeats an answer, with other tokens than
        transformers'.

        Args:
            inputs: Prompts (B, T), padded at the left; or None with input_ids.
            generation_config: transformers' GenerationConfig; None is the model's.
            **arguments: Other arguments of `model.generate`. A stopping criterion is called with
                one sequence at a time, after each of its tokens, without scores. A logits processor
                is called with one sequence at a time too, for each node of a tree: it must depend
                on its arguments alone (`stree.logits.processors.LogitsProcessor`). A streamer takes
                one prompt.

        Returns:
            Prompts and answers (B, T'), padded with the padding token.

        Raises:
            UsageError: For an argument that is not supported, which it names: beams, logits
                processors of transformers that remember their calls, other outputs than tokens,
                other inputs than tokens.
        """
        given = {name: value for name, value in arguments.items() if value is not None}
        with ExitStack() as stack:
            streamer = given.pop("streamer", None)
            if streamer is not None:
                stack.callback(end_of(streamer))  # also after an error: a thread may wait for it
            for ids in (inputs, given.get("input_ids")):
                _require_tensor(ids)
            _require_supported(given, generation_config, self.model.generation_config)
            _require_no_hooks(self.model)
            self._follow()
            generation_config = _stop_strings_as_criterion(generation_config, given)
            # transformers gives neither streamer nor tokenizer to another's loop
            decode = partial(self._decode, streamer)
            return self.model.generate(inputs, generation_config, custom_generate=decode, **given)

    def _follow(self) -> None:
        """Share the model's weights anew if it was trained or moved: some of ours are copies."""
        if not self._made_of.are_those_of(self.model):
            self._batch = None  # frees its buffers before another model is made
            self.target, self._made_of = shared_model(self.model), _Weights(self.model)

    def _decode(
        self, streamer: Any, model: Any, input_ids: Tensor, logits_processor: Any = None,
        stopping_criteria: Any = None, generation_config: Any = None, **prepared: Any,
    ) -> Tensor:
        """Decode in place of transformers' own loop, which calls it with all that it prepared."""
        if streamer is not None and len(input_ids) > 1:
            raise UsageError(f"got {len(input_ids)} prompts: a streamer shows one answer at a time")
        if streamer is not None:
            streamer.put(input_ids.cpu())
        if not len(input_ids):
            return input_ids
        mask = prepared.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise UsageError("attention_mask pads at the right: wanted padding at the left")
        stops = _Stops(stopping_criteria, input_ids.shape[1])
        settings, called = settings_of(
            logits_processor, bool(generation_config.do_sample), stops.eos_ids, stops.prompt_length,
            mask,
        )
        prompts, _ = prompts_of(input_ids, mask)
        requests: list[Request] = []
        times = generation_config.num_return_sequences or 1  # as often a prompt comes, in a row
        for number, prompt in enumerate(prompts):
            if number % times == 0:
                shared = SharedPrompt(times - 1)
            seed = int(torch.randint(2**62, ())) if "temperature" in settings else None
            padding = input_ids[number : number + 1, : input_ids.shape[1] - len(prompt)]
            own = CalledForRow(called, number, padding) if called else ()
            generation = GenerationConfig(
                stops.max_new_tokens, seed=seed, eos_token_id=stops.eos_ids or None,
                ignore_eos=not stops.eos_ids, logits_processor=own, **settings,
            )
            requests.append(SampleRequest(prompt, generation, keep_prompt=True, shared=shared))
        rows = [torch.tensor(each) for each in self._serve(requests, input_ids, stops, streamer)]
        padded_by = generation_config._pad_token_tensor
        padding_id = 0 if padded_by is None else int(padded_by)
        new = pad_sequence(rows, batch_first=True, padding_value=padding_id)
        return torch.cat([input_ids, new.to(input_ids)], dim=1)

    def _serve(
        self, requests: list[Request], input_ids: Tensor, stops: _Stops, streamer: Any
    ) -> list[list[int]]:
        """Return the new tokens of each request."""
        batch = self._batch_for(requests)
        tokens: list[list[int]] = [[] for _ in requests]
        ends: list[int | None] = [None] * len(requests)  # number of tokens at which each ends
        under_way: dict[int, Served] = {}
        with closing(batch.serve(requests)) as reports:
            for served in reports:
                index, report = served.number, served.report
                if report.error is not None:
                    continue  # which `serve` raises
                under_way[index] = served
                for token in report.tokens:
                    tokens[index].append(token)
                    if streamer is not None and ends[index] is None:
                        streamer.put(torch.tensor([token]))
                    if ends[index] is None and stops.asked(input_ids[index], tokens[index]):
                        ends[index] = len(tokens[index])
                if report.finish_reason:
                    ends[index] = ends[index] or len(tokens[index])
                if stops.eos_ids:
                    if ends[index] is not None:
                        served.release()
                elif None not in ends:
                    # Without an EOS, transformers lets sequences go on until the last one stops
                    last = max(end for end in ends if end is not None)
                    for each in under_way.values():
                        if len(tokens[each.number]) >= last:
                            each.release()
        self.outputs = [under_way[index].release() for index in range(len(requests))]
        if stops.eos_ids:
            return [row[:end] for row, end in zip(tokens, ends, strict=True)]
        last = max(end for end in ends if end is not None)
        return [row[:last] for row in tokens]

    def _batch_for(self, requests: Sequence[Request]) -> BatchDecoder:
        """Return a batch with large enough buffers, that of the last call if it fits."""
        longest = self._max_depth + 1 + max(
            len(each.prompt_ids) + each.generation.max_new_tokens for each in requests
        )
        if self.tree_policy.needs_step_times:
            longest = max(longest, length_to_time(self.tree_policy.deepest))
        batch = self._batch
        if batch is None or batch.num_rows < len(requests) or batch.max_length < longest:
            num_rows = max(len(requests), batch.num_rows if batch else 0)
            rounded = -(-longest // LENGTH_STEP) * LENGTH_STEP
            length = max(rounded, batch.max_length if batch else 0)
            self._batch = batch = None  # before there is another one
            batch = BatchDecoder(
                self.target, self.drafter, self.tree_policy,
                num_rows=num_rows, max_length=length, verifier=self.verifier,
                backtracking=self.backtracking, num_prefixes=self.num_prefixes,
            )
            asked = requests[0].generation
            if self.tree_policy.misfit(self.target, asked.temperature, num_rows):
                batch.measure_step_times(generation=asked)
            self._batch = batch
        return batch


class _Stops:
    """transformers' stopping criteria: lengths and EOS become settings, others are called."""

    def __init__(self, criteria: Any, prompt_length: int) -> None:
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        lengths = [each.max_length for each in criteria if isinstance(each, MaxLengthCriteria)]
        if not lengths:
            raise UsageError("generate was given no length at which to stop: give max_new_tokens")
        self.prompt_length = prompt_length
        self.max_new_tokens = min(lengths) - prompt_length
        ends = [each for each in criteria if isinstance(each, EosTokenCriteria)]
        self.eos_ids = tuple(sorted({int(i) for each in ends for i in each.eos_token_id}))
        own = (MaxLengthCriteria, EosTokenCriteria)
        self.others = [each for each in criteria if not isinstance(each, own)]

    def asked(self, prompt: Tensor, tokens: list[int]) -> bool:
        """Return whether a criterion ends the sequence (T,) here."""
        if not self.others:
            return False
        so_far = torch.cat([prompt, prompt.new_tensor(tokens)])[None]
        return any(bool(torch.as_tensor(each(so_far, None)).any()) for each in self.others)


def _stop_strings_as_criterion(generation_config: Any, given: dict[str, Any]) -> Any:
    """Turn stop strings, in the arguments or the config, into a stopping criterion.

    Returns the config without them.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    tokenizer = given.pop("tokenizer", None)
    strings = given.pop("stop_strings", None) or getattr(generation_config, "stop_strings", None)
    if not strings:
        return generation_config
    if tokenizer is None:
        raise UsageError("stop_strings need the tokenizer: pass tokenizer= beside them")
    criteria = [*given.get("stopping_criteria", ()), StopStringCriteria(tokenizer, strings)]
    given["stopping_criteria"] = StoppingCriteriaList(criteria)
    if generation_config is not None:
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    return generation_config


def _require_supported(arguments: dict[str, Any], *configs: Any) -> None:
    """Raise `UsageError` for unknown arguments, and for settings that are not supported.

    Those ask for another search than token by token, or for other answers than ids. The first value
    of arguments and configs counts.
    """
    from transformers import GenerationConfig as Theirs

    known = {*_TAKEN, *_PLAIN, *vars(Theirs())}
    refused = {name: value for name, value in arguments.items() if name not in known}
    for name, neutral in _PLAIN.items():
        said = (arguments.get(name), *(getattr(config, name, None) for config in configs))
        value = next((each for each in said if each is not None), neutral)
        if value != neutral:
            refused[name] = value
    refuse(refused, _INSTEAD)


def _require_no_hooks(model: Any) -> None:
    """Raise `UsageError` for a hook that might change a module's outputs.

    Hooks of transformers only record them, and are allowed.
    """
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not str(getattr(hook, "__module__", None)).startswith("transformers."):
                raise UsageError(
                    f"{name or 'the model'} has a forward hook, which is not run here: remove it, "
                    "or decode with model.generate alone"
                )


class _Weights:
    """The weights of a model at one moment, to find out whether one was trained or replaced.

    Writes through `.data` are not seen.
    """

    def __init__(self, model: Any) -> None:
        # Kept, so that no new tensor gets the identity of a replaced one
        self.tensors = [*model.parameters(), *model.buffers()]
        self.versions = versions_of(self.tensors)
        self.place = model.device, model.dtype

    def are_those_of(self, model: Any) -> bool:
        now = _Weights(model)
        same = list(map(id, now.tensors)) == list(map(id, self.tensors))
        return same and (now.versions, now.place) == (self.versions, self.place)


class _KeptDecoder:
    """The decoder that `generate` keeps with a model; a copy or a pickle of the model has none."""

    def __init__(self, made_of: Any, decoder: TransformersDecoder) -> None:
        self.made_of, self.decoder = made_of, decoder

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def generate(
    model: Any, *, drafter: Any = None, tree: StepTree | TreePolicy | str | None = None,
    verifier: str | Verifier = "coupled", backtracking: str = "replay", num_prefixes: int = 0,
    **arguments: Any,
) -> Tensor:
    """Run `model.generate(…, custom_generate=stree.CUSTOM_GENERATE)` for transformers.

    It takes the arguments of `from_transformers` in addition to those of `model.generate`. The
    decoder is kept with the model, for the next call with the same arguments.
    """
    options: dict[str, Any] = dict(
        verifier=verifier, backtracking=backtracking, num_prefixes=num_prefixes
    )
    made_of = (drafter, tree, options, model.device, model.dtype)
    kept = model.__dict__.get(_KEPT)
    if kept is None or kept.made_of != made_of or kept.decoder.model is not model:
        model.__dict__.pop(_KEPT, None)  # frees its buffers before others are made
        kept = _KeptDecoder(made_of, from_transformers(model, drafter, tree, **options))
        model.__dict__[_KEPT] = kept
    return kept.decoder.generate(**arguments)
