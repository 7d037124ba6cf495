"""Where the time of a request with KVBoost inside vLLM goes. Runs in an environment that has vLLM,
with the options of ``kvboost.bench.peers.workers.vllm_connector``. The last line is JSON.

    python scripts/vllm_parts.py --shape 7b --lengths 8192
"""

from __future__ import annotations

import json
import time
from typing import Any

from kvboost.bench.peers.workers import vllm_connector
from kvboost.bench.peers.workers.vllm_connector import ask, measure, start


def main() -> None:
    options = vllm_connector.arguments().parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    llm = start(options, max(lengths))
    vllm_connector.ask = ask_in_parts
    found = {str(length): measure(llm, options, length) for length in lengths}
    print(json.dumps({"shape": options.shape, **found}))


def ask_in_parts(llm: Any, prompts: list[list[int]], mode: str, tokens: int = 1) -> Any:
    """Prints what the parts of a request with the connector take."""
    with profiled() as parts:
        found = ask(llm, prompts, mode, tokens)
    if mode != "off":
        print("parts", len(prompts[0]), {name: round(ms, 1) for name, ms in parts.items()})
    return found


class profiled:
    """Times the parts of a moved request, waiting for the GPU after each."""

    def __enter__(self) -> dict[str, float]:
        import torch

        from kvboost.integrations.vllm.planner import Planner
        from kvboost.integrations.vllm.repair import Repairer
        from kvboost.integrations.vllm.worker import Worker

        timed_parts: list[tuple[type, str]] = [(Planner, "plan"), (Repairer, "run")]
        timed_parts += [(Worker, "_place"), (Worker, "step")]
        timed_parts += [(Worker, "_put"), (Worker, "keep")]
        self._plain = [(owner, name, getattr(owner, name)) for owner, name in timed_parts]
        parts: dict[str, float] = {}
        for owner, name, plain in self._plain:

            def timed(*args: Any, _name: str = name, _plain: Any = plain, **more: Any) -> Any:
                torch.cuda.synchronize()
                started = time.perf_counter()
                result = _plain(*args, **more)
                torch.cuda.synchronize()
                label = f"{_name} {len(args[2])}" if _name == "run" else _name
                parts[label] = parts.get(label, 0.0) + (time.perf_counter() - started) * 1e3
                return result

            setattr(owner, name, timed)
        return parts

    def __exit__(self, *error: object) -> None:
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)


if __name__ == "__main__":
    main()
