"""Decoder layers that do not fit into the memory of a GPU, streamed through a few buffers on it.

    file ──reader thread──► pinned buffers ─┐
                                            ├─one copy a layer──► slots on the GPU ──► the layer
    registered memory, one slab a layer ────┘

A pass through the model costs the time of these copies, whether it has one row or five hundred.
"""
