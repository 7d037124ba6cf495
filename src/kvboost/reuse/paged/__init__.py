"""Known and moved text over KV in pages, on GPUs: our own requests' and vLLM's. Stored rows are
placed in one launch (``kernels.py``), and forwards of up to a few thousand rows at any positions
are CUDA graphs (``graphs.py``; ``forwards.py`` for our own engine).

All modules but ``hooks.py`` import Triton's kernels."""
