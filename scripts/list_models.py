"""Writes the tables of docs/models.md: the families that the tests run, and why others do not.

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
        return Family(
            name, False, packed, pages, "states", "from states", states=True, adapters=not shares
        )
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
    moves = bool(rotated) and not without and name not in SCALED and pages
    moves = moves and getattr(model.config, "vision_config", None) is None
    in_vllm = "–" if latent else f"exact{_moved_in_vllm(text)}" if moves else "exact"
    return Family(name, True, packed, pages, keys, in_vllm)


def _moved_in_vllm(text: Any) -> str:
    """What vLLM's connector says of moved text, by which layers have windows."""
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = "sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None)
    if not windows:
        return ", moved"
    return ", moved in one group" if "full_attention" in kinds else ""


def page() -> str:
    """The page with its tables, which are between comments that name them, anew."""
    text = PAGE.read_text()
    for name, rows in (("families", family_rows()), ("not supported", unsupported_rows())):
        start, end = f"<!-- {name} -->\n\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        assert after, f"{PAGE} lacks the comments around the table of {name}"
        table = "".join(f"| {row} |\n" for row in rows)
        text = f"{before}{start}{table}{end}{after}"
    return text


def family_rows() -> list[str]:
    """One row for all families of which the same can be said, the largest group first."""
    from kvboost.model.quantized.gguf_weights import ARCHITECTURES as IN_GGUF
    from kvboost.model.vision.families import FAMILIES as SEEING

    groups: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(families(), key=lambda family: family.name):
        in_gguf = family.name.removesuffix("_text") in IN_GGUF
        exact = "yes" if family.moves else "with `strict=False`"
        exact = "from states" if family.states else exact
        adapters = "yes" if family.adapters else "–"
        marks = ["yes" if one else "–" for one in (family.moves, family.packed, family.pages)]
        marks.insert(1, "yes" if family.name in SEEING else "–")
        cells = (exact, *marks, adapters, "yes" if in_gguf else "–", family.in_vllm, family.keys)
        groups.setdefault(cells, []).append(f"`{family.name}`")
    heads = ("Families", "Exact", "Moved", "Images", "Batch", "Pages", "Adapters", "Packed")
    heads += ("In vLLM", "Keys")
    rows = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for cells, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        rows.append(" | ".join([", ".join(names), *cells]))
    return rows


def unsupported_rows() -> list[str]:
    from kvboost.model.loading.unsupported import WHY_NOT

    rows = ["A model of this family … | Families", "--- | ---"]
    for reason in dict.fromkeys(WHY_NOT.values()):
        names = ", ".join(f"`{name}`" for name, why in WHY_NOT.items() if why == reason)
        rows.append(f"{reason} | {names}")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page())
