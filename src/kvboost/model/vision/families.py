"""The ways in which families of models read images: what an image becomes in the text of a prompt,
and what its vision tower takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Tile:
    """The parts of an image's text."""

    row: str
    """The token of each row."""
    num_rows: int
    """Rows of one tile; an image is one tile or several. Of Qwen-VL, patches of one row."""

    @property
    def rows(self) -> str:
        return self.row * self.num_rows


@dataclass(frozen=True)
class Family:
    """``text`` gives the text of an image, from a tile and what the image processor returned for
    it. ``options`` go to the image processor; of what it returns, the tower gets ``pixels``."""

    placeholder: str
    tile_rows: Callable[[Any], float]
    """The rows of a tile, from the config."""
    text: Callable[[Tile, Mapping[str, Any]], str]
    options: Mapping[str, Any]
    pixels: tuple[str, ...] = ("pixel_values",)
    tile_axis: int | None = 0
    """The axis of ``pixels`` along which tiles can be computed one after the other."""
    grid: Callable[[Any, Mapping[str, Any]], tuple[int, int]] | None = None
    """The lines and columns of an image's rows, from the image processor and what it returned, for
    models that number rows in three dimensions (M-RoPE)."""
    sees_ahead: bool = False
    """Whether the rows of an image attend to those after them, up to its end."""


def _patches(config: PretrainedConfig) -> float:
    """Patches of the image of a vision tower."""
    vision = config.vision_config
    size, patch = (
        one[0] if isinstance(one, (list, tuple)) else one
        for one in (vision.image_size, vision.patch_size)
    )
    return float((size // patch) ** 2)


def _with_rows_and_columns(tile: Tile, found: Mapping[str, Any]) -> str:
    """Idefics 3 and SmolVLM: tiles are named by their places, and the whole image comes last."""
    edge = "<fake_token_around_image>"
    whole = f"{edge}<global-img>{tile.rows}{edge}"
    rows, columns = (found[name][0][0] for name in ("rows", "cols"))
    if not rows and not columns:
        return whole
    lines = (
        "".join(f"{edge}<row_{row + 1}_col_{column + 1}>{tile.rows}" for column in range(columns))
        for row in range(rows)
    )
    return "".join(f"{line}\n" for line in lines) + f"\n{whole}"


def _in_brackets(tile: Tile, found: Mapping[str, Any]) -> str:
    """InternVL: all tiles in a row."""
    return f"<img>{tile.rows * int(found['num_patches'][0])}</img>"


def _between_lines(tile: Tile, found: Mapping[str, Any]) -> str:
    """Gemma 3: an image is one tile, on lines of its own."""
    return f"\n\n<start_of_image>{tile.rows}<end_of_image>\n\n"


def _row_by_row(tile: Tile, found: Mapping[str, Any]) -> str:
    """Qwen-VL: a row for each group of patches that are merged; the template has the brackets."""
    return tile.row * (int(found["image_grid_thw"][0].prod()) // tile.num_rows)


def _merged_grid(processor: Any, found: Mapping[str, Any]) -> tuple[int, int]:
    _, lines, columns = found["image_grid_thw"][0].tolist()
    return lines // processor.merge_size, columns // processor.merge_size


_QWEN = Family(
    "<|image_pad|>",
    lambda config: config.vision_config.spatial_merge_size**2,
    _row_by_row,
    {},
    ("pixel_values", "image_grid_thw"),
    tile_axis=None,
    grid=_merged_grid,
)
_IDEFICS = Family(
    "<image>",
    lambda config: _patches(config) / config.scale_factor**2,
    _with_rows_and_columns,
    {"return_row_col_info": True},
    ("pixel_values", "pixel_attention_mask"),
    tile_axis=1,
)
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        "<start_of_image>",
        lambda config: config.mm_tokens_per_image,
        _between_lines,
        {"do_pan_and_scan": False},
        sees_ahead=True,
    ),
    "idefics3": _IDEFICS,
    "internvl": Family(
        "<IMG_CONTEXT>",
        lambda config: _patches(config) * config.downsample_ratio**2,
        _in_brackets,
        {"crop_to_patches": True},
    ),
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": _IDEFICS,
}
"""By model type."""
