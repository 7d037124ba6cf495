"""What clients may send for embeddings and rankings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from kvboost.serve.request_fields import (
    MAX_INPUTS,
    WHOLE,
    Body,
    SomeText,
    Text,
    TokenIds,
    Truncate,
    one_of,
    prompt_kind,
    some,
)


class EmbeddingRequest(Body):
    model: Text
    input: Annotated[
        Annotated[SomeText, Tag("as text")]
        | Annotated[list[SomeText], some(MAX_INPUTS), Tag("as texts")]
        | Annotated[TokenIds, Tag("as ids")]
        | Annotated[list[TokenIds], some(MAX_INPUTS), Tag("as lists of ids")],
        one_of(
            prompt_kind,
            f"a string, token ids, or a list of up to {MAX_INPUTS} of either; none of them empty",
        ),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    """Only the model's own number: its vectors cannot be shortened."""
    truncate_prompt_tokens: Truncate | None = None
    user: Text | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs, even if there is only one."""
        match self.input:
            case str():
                return [self.input]
            case [int(), *_]:
                return [self.input]  # type: ignore[return-value]
            case _:
                return self.input  # type: ignore[return-value]


class RerankRequest(Body):
    """Documents to sort by how close they are to a query."""

    model: Text
    query: SomeText
    documents: Annotated[list[SomeText], some(MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1, lt=2**31), WHOLE] | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Truncate | None = None
    user: Text | None = None
