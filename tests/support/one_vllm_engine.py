"""An engine in a process of its own: reads one request a line, as JSON, and answers in lines that
begin with ``ANSWER``. Its options are the first argument."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from support.vllm_engines import Engine, Texts


def main() -> None:
    engine = Engine(json.loads(sys.argv[1]))
    texts = Texts(engine.llm.get_tokenizer(), 280)
    print("ANSWER {}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("fresh"):
            engine.fresh()
        answer = engine.ask(texts.prompt(*asked["order"]), asked["mode"])
        engine.worker.thread.submit(engine.worker.data.flush).result()
        print("ANSWER", json.dumps(asdict(answer)), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
