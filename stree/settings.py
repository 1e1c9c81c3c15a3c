"""Read settings of a generation: our GenerationConfig, `transformers`' own, or keywords.

Settings that are not supported are refused by name; none is ignored silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stree.common.errors import UsageError, one_line
from stree.generation import GenerationConfig, require_whole
from stree.prompts import EncodedPrompt, prompts_of

_OURS = tuple(each.name for each in dataclasses.fields(GenerationConfig))
_TOP_K_OF_TRANSFORMERS = 50  # what its sampling takes where its GenerationConfig names none
# Settings of `transformers`, each with the values that change nothing here (mostly its defaults).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,),
    "early_stopping": (False,), "length_penalty": (1.0,), "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,), "renormalize_logits": (False,), "remove_invalid_values": (False,),
    "token_healing": (False,), "use_cache": (True,), "return_dict_in_generate": (False,),
    "output_attentions": (False,), "output_hidden_states": (False,), "output_scores": (False,),
    "output_logits": (False,), "is_assistant": (False,), "synced_gpus": (False,),
}
# Settings without effect here: a config file's words about itself, and ids that only padded
# batches and empty prompts need.
_WITHOUT_EFFECT = ("pad_token_id", "bos_token_id", "transformers_version", "_from_model_config")
_KNOWN = frozenset((*_OURS, *_WITHOUT_EFFECT))


THEIRS = "transformers' own model.generate does it, without drafts"
# Remedies for settings of `transformers` that are refused
_INSTEAD = {
    "min_length": "min_new_tokens counts the new tokens alone",
    "sequence_bias": "logit_bias={token: bias} is for single tokens, bad_words_ids for sequences",
    "suppress_tokens": "logit_bias={token: -math.inf} leaves a token out",
    "stopping_criteria": "stop_strings and eos_token_id end an answer; stree.from_transformers("
    "model, drafter) takes stopping criteria",
    "output_scores": "logprobs=0 returns the log-probabilities of the tokens",
    "output_logits": "logprobs=0 returns the log-probabilities of the tokens",
    "max_time": "stree.BatchDecoder.step gives tokens as they come: release the row in time",
}
# Names that OpenAI's API and from_transformers have, or had, for what is asked for otherwise here
_ELSEWHERE = {
    "stop": "stop_strings ends an answer at a text",
    "n": "num_return_sequences gives several answers",
    "max_tokens": "it is max_new_tokens here",
    "max_completion_tokens": "it is max_new_tokens here",
    "stream": "streamer= shows tokens as they come, such as transformers.TextStreamer",
    "top_logprobs": "logprobs=5 returns the log-probabilities of the 5 best tokens",
}
# Settings that change logits, or search: here the target's distribution decides alone
_OF_LOGITS = (
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "force_words_ids",
    "constraints", "prefix_allowed_tokens_fn", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "typical_p", "top_h",
    "epsilon_cutoff", "eta_cutoff", "guidance_scale", "exponential_decay_length_penalty",
    "watermarking_config", "num_beams", "num_beam_groups", "penalty_alpha", "dola_layers",
    "length_penalty", "diversity_penalty", "early_stopping", "token_healing",
)

# Prompts (T,) with their settings and `EncodedPrompt.messages_end`; whether they came as a list
Asked: TypeAlias = tuple[list[tuple[Tensor, GenerationConfig, int | None]], bool]


@dataclass(frozen=True)
class Settings:
    """Settings of a generation before its prompt is known.

    Attributes:
        generation: All settings, except a length that counts the prompt.
        max_length: Tokens, prompt included; None if max_new_tokens sets the length.
    """

    generation: GenerationConfig
    max_length: int | None = None

    def after(self, prompt: Sequence[int] | Tensor) -> GenerationConfig:
        """Return the settings for a prompt (T,).

        Raises `UsageError` for an empty one, and when max_length leaves no room after it.
        """
        if not len(prompt):
            raise UsageError("the prompt is empty; give at least one token")
        if self.max_length is None:
            return self.generation
        left = self.max_length - len(prompt)
        if left < 1:
            raise UsageError(
                f"max_length is {self.max_length} and the prompt has {len(prompt)} tokens already: "
                "give max_new_tokens"
            )
        return dataclasses.replace(self.generation, max_new_tokens=left)


def settings_of(given: Any, options: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a config and of keyword arguments, which win over it.

    Args:
        given: Our GenerationConfig, or `transformers`', whose defaults then hold for unset values
            except lengths; None for none.
        options: Settings by keyword; a None is not given.

    Raises:
        UsageError: For a setting that is not supported, which it names.
    """
    asked = {name: value for name, value in (options or {}).items() if value is not None}
    if given is None or isinstance(given, GenerationConfig):
        base = given or GenerationConfig()
    else:
        base, asked = GenerationConfig(), _of_transformers(given) | asked
        _complete_sampling(asked)
    sample, max_length = asked.pop("do_sample", None), asked.pop("max_length", None)
    if max_length is not None:
        require_whole("max_length", max_length)
    if "max_new_tokens" in asked:
        max_length = None  # as in `transformers`
    _refuse_others(asked)
    ours = {name: value for name, value in asked.items() if name in _OURS}
    if sample is not None:
        ours["temperature"] = _temperature(sample, ours.get("temperature"), base)
    # One that is taken as it is was checked when it was made
    return Settings(dataclasses.replace(base, **ours) if ours else base, max_length)


def asked_for(
    inputs: Any, given: Any, attention_mask: Any, options: Mapping[str, Any], tokenizer: Any
) -> Asked:
    """Return each prompt (T,) of a call of `generate` with its settings.

    The second value says whether a list of outputs is wanted.
    """
    options = dict(options)
    if "input_ids" in options:
        if inputs is not None:
            raise UsageError("got prompts twice: as input_ids, and before it")
        inputs = options.pop("input_ids")
    settings = settings_of(given, options)
    ends = (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None))
    pad = getattr(tokenizer, "pad_token_id", None)
    prompts, several = prompts_of(inputs, attention_mask, None if pad in ends else pad)
    asked: list[tuple[Tensor, GenerationConfig, int | None]]
    asked = [(prompt, settings.after(prompt), None) for prompt in prompts]
    return asked, several or options.get("num_return_sequences") is not None


def asked_of_texts(
    encode: Callable[[Any, Any], EncodedPrompt], given: Any, several: bool, generation_config: Any,
    options: Mapping[str, Any], tokenizer: Any,
) -> Asked:
    """Encode texts or conversations, and return the same as `asked_for`.

    Args:
        encode: Called with the tokenizer and a text or conversation.
        given: A text or conversation, or a list of them.
        several: Whether `given` is a list.
        generation_config: As in `settings_of`.
        options: As in `settings_of`.
        tokenizer: None raises `UsageError`.
    """
    if tokenizer is None:
        raise UsageError("the decoder has no tokenizer for texts: make it with tokenizer=…")
    settings = settings_of(generation_config, options)
    texts = given if several else [given]
    encoded = [encode(tokenizer, each) for each in texts]
    prompts = [torch.tensor(each.ids, dtype=torch.long) for each in encoded]
    asked = [
        (prompt, settings.after(prompt), each.messages_end)
        for prompt, each in zip(prompts, encoded, strict=True)
    ]
    return asked, several or options.get("num_return_sequences") is not None


def end_of(streamer: Any) -> Callable[[], Any]:
    """Return the method that ends a streamer. Raises `UsageError` for an object that is none."""
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise UsageError(
            f"streamer is {streamer!r:.60}, wanted an object with put(tokens) and end(), such as "
            "transformers.TextStreamer"
        )
    return streamer.end


def _of_transformers(given: Any) -> dict[str, Any]:
    """Return the values that a GenerationConfig of `transformers` sets."""
    from transformers import GenerationConfig as Theirs

    if not isinstance(given, Theirs):
        raise UsageError(
            f"generation_config is a {type(given).__name__} ({given!r:.60}), wanted a "
            "GenerationConfig of stree or transformers; settings are keyword arguments, too"
        )
    unset = Theirs().to_dict()
    return {
        name: value for name, value in given.to_dict().items()
        if value is not None and value != unset.get(name)
    }


def _complete_sampling(asked: dict[str, Any]) -> None:
    """Set the sampling defaults of `transformers` where nothing is set."""
    if asked.get("do_sample") is True:
        asked.setdefault("top_k", _TOP_K_OF_TRANSFORMERS)
    elif "do_sample" not in asked:
        if asked.get("temperature", 1.0) != 1.0:
            raise UsageError(
                f"generation_config has temperature = {asked['temperature']} and no do_sample, so "
                "that transformers would be greedy: set do_sample to True or False"
            )
        asked["do_sample"] = False


def _temperature(sample: Any, given: Any, base: GenerationConfig) -> Any:
    if not isinstance(sample, bool):
        raise UsageError(f"do_sample is {sample!r}, wanted True or False")
    if not sample:
        return 0.0
    if given is not None and not isinstance(given, bool) and given == 0:
        raise UsageError("do_sample is True and temperature 0, which is greedy: change one of them")
    return given if given is not None else base.temperature or 1.0


def _refuse_others(asked: Mapping[str, Any]) -> None:
    """Raise `UsageError` for settings that are neither ours nor without effect."""
    refuse({
        name: value for name, value in asked.items()
        if name not in _KNOWN and not _is_neutral(name, value)
    })


def refuse(refused: Mapping[str, Any], instead: Mapping[str, str] | None = None) -> None:
    """Raise `UsageError` for settings by name, with what to do instead of each (`instead`)."""
    if refused:
        listed = ", ".join(
            f"{name} = {one_line(repr(value)):.60}" for name, value in refused.items()
        )
        remedies = dict.fromkeys((instead or {}).get(name) or _remedy(name) for name in refused)
        raise UsageError(f"generate cannot honour {listed}: {'; '.join(remedies)}")


def _remedy(name: str) -> str:
    if name in _OF_LOGITS:
        return THEIRS
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    if name in _INSTEAD or name in _NEUTRAL:
        return _INSTEAD.get(name, "leave it out")
    if name in _OURS:
        return "the decoder of stree.load takes it"
    meant = get_close_matches(name, (*_OURS, "do_sample", "max_length"), 1, 0.7)
    return f"did you mean {meant[0]}?" if meant else "leave it out"


def _is_neutral(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in _NEUTRAL.get(name, ())
