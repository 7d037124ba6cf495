"""Quantised weights in safetensors files: AWQ, GPTQ, compressed-tensors and MXFP4.

Codes are packed into 32-bit integers, eight of 4 bits or four of 8:

    awq                 qweight [k, n / 8]    qzeros [k / group, n / 8]   scales [k / group, n]
    gptq                qweight [k / 8, n]    qzeros [k / group, n / 8]   scales [k / group, n]
    compressed-tensors  weight_packed [n, k / 8], weight_scale [n, k / group],
                        weight_zero_point [n / 8, k / group]

In these a weight is ``(code - zero) * scale``. Of models with ``mxfp4``, experts are quantised:

    mxfp4               blocks uint8 [experts, n, k / 32, 16], scales uint8 [experts, n, k / 32]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvboost.errors import ModelError
from kvboost.model.quantized.checkpoint import CPU, refused
from kvboost.model.quantized.layers import Rows
from kvboost.model.quantized.mxfp4 import Mxfp4Weight
from kvboost.model.quantized.weight import QuantizedWeight

METHODS = ("awq", "gptq", "compressed-tensors")
MXFP4 = "mxfp4"
IN_MXFP4 = ("gpt_oss",)
"""Model types whose experts transformers reads from MXFP4."""
RENAMED = ("gemma3", "gemma3n", "gpt_neox", "internvl", "mistral3", "qwen2_5_vl")
"""Model types whose tensors have other names in files than in transformers."""
WIDEST_GROUP = 256
"""Scales of longer groups are repeated."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ keeps each of eight neighbouring columns in an integer."""
_REMEDY = "weights='plain' leaves the model to transformers, which needs a package for it"


class SafetensorsCheckpoint:
    """A folder as a :class:`QuantizedCheckpoint`."""

    def __init__(self, folder: Path, config: Any) -> None:
        given = config.quantization_config
        settings: Mapping[str, Any] = given if isinstance(given, dict) else given.to_dict()
        self._folder = folder
        self._method = str(getattr(settings["quant_method"], "value", settings["quant_method"]))
        self._settings = settings
        self.format = self._method
        self._check()

    def _check(self) -> None:
        if self._method == MXFP4:
            return
        settings, where = self._settings, f"{self._folder}: its quantization_config"
        if self._method == "compressed-tensors":
            if settings.get("format") != "pack-quantized":
                raise ModelError(
                    f"{where} has the format {settings.get('format')!r}, and only 'pack-quantized' "
                    f"stays packed; {_REMEDY}"
                )
            return
        if settings.get("bits", 4) not in ((4,) if self._method == "awq" else (4, 8)):
            raise ModelError(
                f"{where} has {settings.get('bits')} bits; AWQ with 4 and GPTQ with 4 or 8 stay "
                f"packed; {_REMEDY}"
            )
        if self._method == "awq" and str(settings.get("version", "gemm")).lower() != "gemm":
            raise ModelError(
                f"{where} has the version {settings['version']!r}, and only 'gemm' stays packed; "
                f"{_REMEDY}"
            )

    @cached_property
    def _places(self) -> dict[str, Path]:
        """The file of each tensor."""
        listed = self._folder / "model.safetensors.index.json"
        if listed.is_file():
            names = json.loads(listed.read_text())["weight_map"]
            return {name: self._folder / file for name, file in names.items()}
        files = sorted(self._folder.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{self._folder} holds no safetensors files; {_REMEDY}")
        found = {}
        for file in files:
            with safe_open(file, "pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
        return found

    def _read(self, name: str) -> torch.Tensor:
        if name not in self._places:
            raise ModelError(
                f"{self._folder} holds no tensor {name!r}, which the model needs; the folder is "
                "incomplete, or of another model"
            )
        with safe_open(self._places[name], "pt") as tensors:
            read: torch.Tensor = tensors.get_tensor(name)
        return read

    @property
    def _codes(self) -> str:
        return "weight_packed" if self._method == "compressed-tensors" else "qweight"

    def is_quantized(self, name: str) -> bool:
        module, _, kind = name.rpartition(".")
        return kind == "weight" and f"{module}.{self._codes}" in self._places

    def quantized(self, name: str) -> QuantizedWeight:
        module = name.removesuffix(".weight")
        if self._method == "compressed-tensors":
            return self._compressed(module)
        codes, scales = self._read(f"{module}.qweight"), self._read(f"{module}.scales")
        packed_zeros = self._read(f"{module}.qzeros")
        bits = int(self._settings.get("bits", 4))
        if self._method == "awq":
            plain, zeros = (
                _unpacked(codes, bits, _AWQ_ORDER),
                _unpacked(packed_zeros, bits, _AWQ_ORDER),
            )
            return made_weight(plain.t(), zeros.t(), scales.t(), bits)
        self._refuse_unsorted(f"{module}.g_idx", len(codes) * 32 // bits // len(scales))
        plain = _unpacked(codes.t().contiguous(), bits)
        zeros = _unpacked(packed_zeros, bits).t().int()
        if self._settings.get("checkpoint_format", "gptq") == "gptq":
            zeros = (zeros + 1) & (2**bits - 1)  # such files hold one less
        return made_weight(plain, zeros, scales.t(), bits)

    def _refuse_unsorted(self, name: str, group: int) -> None:
        if name not in self._places:
            return
        groups = self._read(name)
        if not torch.equal(groups.long(), torch.arange(len(groups)) // group):
            raise refused(
                self._folder,
                name,
                "gives columns to groups in another order (desc_act or actorder), and such weights "
                "do not stay packed",
                f"take a version of the model without it; {_REMEDY}",
            )

    def _compressed(self, module: str) -> QuantizedWeight:
        codes, scales = self._read(f"{module}.weight_packed"), self._read(f"{module}.weight_scale")
        n, k = self._read(f"{module}.weight_shape").tolist()
        bits = codes.shape[1] * 32 // k
        if bits not in (4, 8) or codes.shape[1] * 32 != k * bits:
            why = f"has {k} columns in {codes.shape[1]} integers, and 4 and 8 bits stay packed"
            raise refused(self._folder, f"{module}.weight_packed", why, _REMEDY)
        self._refuse_unsorted(f"{module}.weight_g_idx", k // scales.shape[1])
        zeros = torch.full((n, scales.shape[1]), 1 << (bits - 1))
        if f"{module}.weight_zero_point" in self._places:
            packed = self._read(f"{module}.weight_zero_point")
            zeros = _unpacked(packed.t().contiguous(), bits).t()[:n]
        return made_weight(_unpacked(codes, bits), zeros, scales, bits)

    def mxfp4(self, name: str, device: torch.device = CPU) -> Mxfp4Weight | None:
        if f"{name}_blocks" not in self._places:
            return None
        return Mxfp4Weight.of(self._read(f"{name}_blocks"), self._read(f"{name}_scales"), device)

    def rows(self, name: str) -> Rows:
        return self.quantized(name).rows

    def digest(self, name: str) -> str:
        return self.quantized(name).digest()

    def plain(
        self, name: str, device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self._read(name).to(device, dtype)


def _unpacked(
    packed: torch.Tensor, bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """uint8 codes ``[rows, m * 32 / bits]`` of 32-bit integers ``[rows, m]``."""
    octets = packed.reshape(-1).view(torch.uint8).view(len(packed), -1)
    if bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)
    if order is not None and bits == 4:
        octets = octets.view(len(packed), -1, len(order))[..., list(order)].flatten(1)
    return octets


def made_weight(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int
) -> QuantizedWeight:
    """Codes ``[n, k]`` of 0 to 2^bits - 1, zeros and scales ``[n, groups]``, each code minus its
    zero times its scale."""
    group = codes.shape[1] // scales.shape[1]
    scales, offsets = scales.float(), -zeros.float() * scales.float()
    if group > WIDEST_GROUP:
        widths = [width for width in (256, 128, 64, 32) if group % width == 0]
        if widths:
            scales = scales.repeat_interleave(group // widths[0], dim=1)
            offsets = offsets.repeat_interleave(group // widths[0], dim=1)
            group = widths[0]
    if bits == 4:
        kept = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
    else:
        kept = (codes ^ 128).view(torch.int8).contiguous()
        offsets = offsets + 128 * scales
    return QuantizedWeight(kept, scales.contiguous(), offsets.contiguous(), bits, group)
