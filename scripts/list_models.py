"""Writes docs/models.md: the families that the tests run, and why the others are not supported.

    python scripts/list_models.py

It makes the tests' tiny model of every family and measures what the table says. A test fails as
long as the page differs from the code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))

INTRODUCTION = """\
# Models

Every family of models in this table is tested with random weights of its real structure in
float32. [What is not supported](#not-supported-yet) comes below, with the reasons.
`kvboost models MODEL` says the same of a file, a folder or a hub id.

`python scripts/list_models.py` writes this page. What it says of keys is measured on the models of
the tests. A test fails if the page is out of date.

- **Family**: `model_type` in a model's `config.json`.
- **Images**: prompts may have [images](howto/images.md), which are reused as text is, exactly and
  moved. Of other models that see, such as `gemma4`, the text part runs.
- **Exact**: an answer after cached text equals stock transformers, wherever the cached text ends.
  *From states*: it goes on from the last place before that where states are kept, see
  [Models with states](states.md).
- **Moved**: passages at another position are reused. If all of them are recomputed, the logits are
  those of a full prefill.
- **Batch**: requests share forwards, and each answer is the one that its request gets alone.
- **Pages**: KV in pages, with the decode steps that are CUDA graphs on NVIDIA GPUs. Here the tests
  run without a GPU. Experts that are chosen on the host cannot be captured: the model then runs
  without a graph, and `engine.notes` says so.
- **Adapters**: LoRA of the attention's projections equals merged weights.
- **Packed**: GGUF files stay in 4 and 8 bits, see [Quantised weights](quantized.md).
- **In vLLM**: what the [connector](vllm.md#what-is-not-supported) reuses where vLLM has the model.
  This follows from how keys rotate and which layers of the tests' models have windows; a model
  with a sliding window has exact text only. vLLM itself ran Llama, Qwen2 and Gemma 3.
- **Keys**: how they rotate with their position: in halves of a head, or neighbouring channels. A
  model is measured when it is loaded, layer by layer, and refused if its keys do something else.
  *Beside a latent*: layers have [latent attention](cache.md#latents), and one part of a key, which
  all heads share, rotates.

"""

NOT_YET = """
## Not supported yet

With `strict=False` KVBoost tries exact prefix reuse through the model's own attention. Call
`engine.verify_correctness()` before you rely on it. A family that is not on this page is treated
alike.

"""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    moves: bool
    packed: bool
    pages: bool
    keys: str
    in_vllm: str
    states: bool = False
    adapters: bool = True


def families() -> list[Family]:
    """The families that are here: older versions of transformers have fewer."""
    from support import hybrids
    from support.families import HERE, family_model
    from support.tiny import ALL_MODELS, SEEING, any_model

    found = [describe(any_model(name)) for name in [*ALL_MODELS, *SEEING] if "-" not in name]
    found += [describe(family_model(name)) for name in HERE]
    found += [describe(hybrids.hybrid_model(name)) for name in hybrids.HERE]
    parts = {one.name: one for one in found}
    return found + [
        replace(parts[text], name=name) for name, (_, text) in hybrids.SEEING_HYBRIDS.items()
    ]


def describe(model: Any) -> Family:
    """The measurements of a model."""
    from kvboost.model.execution.caches import observe
    from kvboost.model.execution.kv_shape import KVShape
    from kvboost.model.loading.compat import check
    from kvboost.model.loading.key_scales import FAMILIES as SCALED
    from kvboost.model.loading.key_scales import fold
    from kvboost.model.loading.rope import key_rotation, probed_positions

    support = check(model.config, strict=False)
    name, packed = support.model_type, support.packed
    latent = support.architecture.latent
    fold(model)
    observed = observe(model, probed_positions(model, support), latent=latent)
    text = model.config.get_text_config()
    uniform = isinstance(observed.shape, KVShape) and len(observed.layers) == text.num_hidden_layers
    uniform = uniform and not latent
    pages = packed and uniform and not getattr(text, "attention_chunk_size", None)
    if observed.states:
        shares = name.startswith("zamba")  # weights of layers
        return Family(name, False, packed, pages, "states", "–", states=True, adapters=not shares)
    rotation = key_rotation(model, support, observed, strict=True)
    if rotation is None:
        return Family(name, False, packed, pages, support.architecture.positions.value, "exact")
    rotated = {tuple(each.tolist()) for each in rotation.frequencies if each.any()}
    keys = "neighbours" if rotation.interleaved else "halves"
    layers = zip(rotation.frequencies, observed.keys, strict=True)
    if latent:
        keys += ", beside a latent"
    elif any(2 * int(each.count_nonzero()) < of.shape[2] for each, of in layers if each.any()):
        keys += ", part of a head"
    if len(rotated) > 1:
        keys += ", two bases"
    without = not all(each.any() for each in rotation.frequencies)
    if without:
        keys += ", some layers without positions"
    plain = len(rotated) == 1 and not without and name not in SCALED
    kinds = set(getattr(text, "layer_types", None) or ())
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    windowed = "sliding_attention" in kinds or getattr(text, "sliding_window", None)
    sees = getattr(model.config, "vision_config", None) is not None
    moves = plain and pages and not capped and not windowed and not sees
    in_vllm = "–" if latent else "exact, moved" if moves else "exact"
    return Family(name, True, packed, pages, keys, in_vllm)


def page() -> str:
    """The whole page."""
    from kvboost.model.loading.unsupported import WHY_NOT
    from kvboost.model.quantized.gguf_weights import ARCHITECTURES as IN_GGUF
    from kvboost.model.vision.families import FAMILIES as SEEING

    heads = ("Family", "Exact", "Moved", "Images", "Batch", "Pages", "Adapters", "Packed")
    heads += ("In vLLM", "Keys")
    rows = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for family in sorted(families(), key=lambda family: family.name):
        in_gguf = family.name.removesuffix("_text") in IN_GGUF
        exact = "yes" if family.moves else "with `strict=False`"
        exact = "from states" if family.states else exact
        adapters = "yes" if family.adapters else "–"
        marks = ["yes" if one else "–" for one in (family.moves, family.packed, family.pages)]
        marks.insert(1, "yes" if family.name in SEEING else "–")
        cells = [f"`{family.name}`", exact, *marks, adapters, "yes" if in_gguf else "–"]
        rows.append(" | ".join([*cells, family.in_vllm, family.keys]))
    written = INTRODUCTION + "\n".join(f"| {row} |" for row in rows) + "\n"
    written += NOT_YET + "| A model of this family … | Families |\n| --- | --- |\n"
    for reason in dict.fromkeys(WHY_NOT.values()):
        names = ", ".join(f"`{name}`" for name, why in WHY_NOT.items() if why == reason)
        written += f"| {reason} | {names} |\n"
    return written


if __name__ == "__main__":
    PAGE.write_text(page())
