"""Running requests on a GPU: their KV in the pages of one slab (``slab.py``, ``kv.py``,
``pool.py``), attention over it (``batch.py``), decode steps through static buffers (``steps.py``)
that become CUDA graphs (``graphs.py``), sampling on the device (``sampling.py``), and what runs
which rows how (``forward.py``).

What attends or steps imports Triton's kernels; the others do not."""
