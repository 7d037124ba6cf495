"""LangChain as a client of a KVBoost server.

The server has OpenAI's API, so LangChain's own OpenAI class is enough. First start a server in
another terminal:

    kvboost serve

Both questions are about the same notes; the second does not wait until the model has read them.
What makes it work: the notes come first and do not change, and the question comes last.
"""

from __future__ import annotations

import argparse
import sys

NOTES = (
    """\
The lighthouse was lit in 1858. Its lamp burned paraffin until the cable came in 1931. The keeper
wrote the weather down every four hours, and the ships that passed. In the winter of 1892 the sea
took the lower steps, and they were built again in granite. Since 1976 nobody has lived there; a
keeper comes twice a year to clean the lens and to paint the rail.
"""
    * 3
)

QUESTIONS = ("When was the lighthouse lit?", "Who paints the rail?")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--key", default="none", help="needed if the server was started with --api-keys"
    )
    chosen = parser.parse_args(arguments)
    try:
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_openai import ChatOpenAI
    except ModuleNotFoundError:
        sys.exit("this example needs LangChain: pip install langchain-openai")

    chat = ChatOpenAI(
        base_url=chosen.url,
        api_key=chosen.key,
        model=chosen.model,
        temperature=0,
        max_tokens=24,
        max_retries=1,
    )
    for question in QUESTIONS:
        answer = chat.invoke([SystemMessage(NOTES), HumanMessage(question)])
        usage = answer.usage_metadata
        cached = usage["input_token_details"].get("cache_read", 0)
        print(f"{question}\n  {answer.content}")
        print(f"  {cached} of {usage['input_tokens']} prompt tokens were reused")

    print("Streamed:", end=" ")
    for piece in chat.stream([SystemMessage(NOTES), HumanMessage("Describe it in a sentence.")]):
        print(piece.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
