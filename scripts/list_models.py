"""Writes the tables of docs/models.md: the families that the tests run, and why others do not.

    python scripts/list_models.py

It makes the tests' tiny model of every family and measures how its keys rotate. What KVBoost does
with the family is in ``kvboost.model.fit.features``. A test fails as long as the page differs from
the code, or this table from the tiny models.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from kvboost.model.fit.features import Features, features
from kvboost.model.quantized.safetensors import MXFP4

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
sys.path.insert(0, str(ROOT / "tests"))


@dataclass(frozen=True)
class Measured:
    """Facts that a model's KV shows."""

    keys: str
    """How they rotate."""
    rotates: bool
    has_states: bool
    in_some_layers_only: bool
    """Whether other layers do not rotate their keys."""
    is_uniform: bool
    """Whether all layers keep the same KV."""
    keeps_names: bool
    """Whether its tensors have the same names in files."""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    features: Features
    measured: Measured


def families() -> list[Family]:
    """The families that are here: older versions of transformers have fewer."""
    from support import hybrids
    from support.tiny import TEXT_PARTS

    found = [
        Family(model.config.model_type, features(model.config), measure(model))
        for model in _tiny_models()
    ]
    of_text = {one.name: one for one in found}
    parts = TEXT_PARTS | {name: text for name, (_, text) in hybrids.SEEING_HYBRIDS.items()}
    return found + [replace(of_text[text], name=name) for name, text in parts.items()]


def _tiny_models() -> Iterator[Any]:
    from support import hybrids
    from support.families import HERE, family_model
    from support.tiny import ALL_MODELS, SEEING, any_model

    yield from (any_model(name) for name in [*ALL_MODELS, *SEEING] if "-" not in name)
    yield from (family_model(name) for name in HERE)
    yield from (hybrids.hybrid_model(name) for name in hybrids.HERE)


def measure(model: Any) -> Measured:
    from transformers.core_model_loading import revert_weight_conversion

    from kvboost.model.execution.caches import observe
    from kvboost.model.execution.kv_shape import KVShape
    from kvboost.model.loading.compat import check
    from kvboost.model.loading.key_scales import fold
    from kvboost.model.loading.rope import key_rotation, probed_positions

    support = check(model.config, strict=False)
    latent = support.architecture.latent
    fold(model)
    observed = observe(model, probed_positions(model, support), latent=latent)
    num_layers = model.config.get_text_config().num_hidden_layers
    is_uniform = isinstance(observed.shape, KVShape) and len(observed.layers) == num_layers
    in_files = revert_weight_conversion(model, model.state_dict())
    alike = is_uniform, all(name in in_files for name, _ in model.named_parameters())
    if observed.states:
        return Measured("states", False, True, False, *alike)
    rotation = key_rotation(model, support, observed, strict=True)
    if rotation is None:
        return Measured(support.architecture.positions.value, False, False, False, *alike)
    rotated = {tuple(each.tolist()) for each in rotation.frequencies if each.any()}
    keys = "neighbours" if rotation.interleaved else "halves"
    layers = zip(rotation.frequencies, observed.keys, strict=True)
    if latent:
        keys += ", beside a latent"
    elif any(2 * int(each.count_nonzero()) < of.shape[2] for each, of in layers if each.any()):
        keys += ", part of a head"
    if len(rotated) > 1:
        keys += ", two bases"
    in_some_only = not all(each.any() for each in rotation.frequencies)
    if in_some_only:
        keys += ", some layers without positions"
    return Measured(keys, bool(rotated), False, in_some_only, *alike)


def page(found: Sequence[Family]) -> str:
    """The page with its tables, which are between comments that name them, anew."""
    text = PAGE.read_text()
    for name, rows in (("families", family_rows(found)), ("not supported", unsupported_rows())):
        start, end = f"<!-- {name} -->\n\n", f"\n<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        assert after, f"{PAGE} lacks the comments around the table of {name}"
        table = "".join(f"| {row} |\n" for row in rows)
        text = f"{before}{start}{table}{end}{after}"
    return text


def family_rows(found: Sequence[Family]) -> list[str]:
    """One row for all families of which the same can be said, the largest group first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for family in sorted(found, key=lambda family: family.name):
        its = replace(family.features, packed=_packed(family.features))
        cells = (*map(_cell, astuple(its)), family.measured.keys)
        groups.setdefault(cells, []).append(f"`{family.name}`")
    heads = ("Families", "Exact", "Moved", "Images", "Batch", "Pages", "Adapters", "Packed")
    heads += ("In vLLM", "Keys")
    rows = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for cells, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        rows.append(" | ".join([", ".join(names), *cells]))
    return rows


def _packed(of: Features) -> str:
    if of.packed.startswith(MXFP4):
        return "MXFP4"
    return "yes" if of.packed.startswith("GGUF") else "no"


def _cell(said: str) -> str:
    """What a feature says, without reasons and conditions."""
    return {"no": "–", "with strict=False": "with `strict=False`"}.get(
        short := said.partition(":")[0], short
    )


def unsupported_rows() -> list[str]:
    from kvboost.model.loading.unsupported import WHY_NOT

    rows = ["A model of this family … | Families", "--- | ---"]
    for reason in dict.fromkeys(WHY_NOT.values()):
        names = ", ".join(f"`{name}`" for name, why in WHY_NOT.items() if why == reason)
        rows.append(f"{reason} | {names}")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(families()))
