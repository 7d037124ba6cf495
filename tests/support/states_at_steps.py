"""An extension of vLLM's workers with which Mamba layers leave states where steps end only.

vLLM (0.32) also leaves some within a step, which its kernels for CPUs cannot do.
"""

from __future__ import annotations

from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec  # type: ignore[method-assign]


class StatesAtSteps:
    """Workers import it, and with it this module."""
