"""Bodies of requests, as OpenAI's API has them, with what else this server takes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from stree.common.errors import UsageError

# Keys that clients send though they change no token here
IGNORED = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls", "prediction", "skip_special_tokens",
    "spaces_between_special_tokens", "add_generation_prompt", "verbosity",
})


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class JsonSchema(BaseModel):
    """A schema that the answer follows."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """The form of an answer: text, any JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(BaseModel):
    """Body of either kind of completion.

    Keys that change the answer elsewhere and are not served here are refused by name.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stop: str | list[str | int] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    echo: bool = False
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None
    speculation: bool | str = True
    return_token_ids: bool = False
    return_drafts: bool = False
    timeout_s: float | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Leave out keys without a value, which stand for the default."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}

    def require_known(self) -> None:
        """Raise `UsageError` for a key that is not served."""
        without_effect = {
            "best_of": (self.n,), "modalities": (["text"],), "include_stop_str_in_output": (False,),
        }
        unknown = {
            name for name, value in (self.model_extra or {}).items()
            if value not in without_effect.get(name, ([], {}))
        } - IGNORED
        if unknown:
            raise UsageError(
                f"{', '.join(sorted(unknown))} is not served here: leave it out (served are "
                f"{', '.join(sorted(type(self).model_fields))})"
            )


class ChatBody(Body):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens to name; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None


class CompletionBody(Body):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Best tokens to name; None for no log-probabilities."""
        return self.logprobs
