"""LlamaIndex."""

from __future__ import annotations

import pytest
from llama_index.core import Document, MockEmbedding, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

from support.questions import NOTES, Verdict


@pytest.fixture
def llm(server) -> OpenAILike:
    return OpenAILike(
        api_base=server.url,
        api_key="none",
        model=server.model,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=8192,
        max_tokens=48,
        temperature=0,
        max_retries=0,
        timeout=300,
    )


def test_chat_complete_and_stream(llm, has_run) -> None:
    assert llm.chat([ChatMessage(role="user", content="Say something.")]).message.content
    assert llm.complete("Say something.").text
    assert [piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content="Hi")])]
    has_run("llama-index-core", "chat, complete, streaming")


def test_a_query_engine_answers(llm, has_run) -> None:
    index = VectorStoreIndex.from_documents(
        [Document(text=NOTES)], embed_model=MockEmbedding(embed_dim=8)
    )
    assert str(index.as_query_engine(llm=llm).query("When was it lit?"))
    has_run("llama-index-core", "`VectorStoreIndex` query engine")


def test_structured_output(llm, has_run) -> None:
    found = llm.as_structured_llm(Verdict).complete("Think of an animal.").raw
    assert isinstance(found, Verdict)
    has_run("llama-index-core", "`as_structured_llm`")
