"""Benchmarks for people who work on KVBoost. They run from a clone: ``python -m benchmarks NAME``.

entries.py      the list of them all, with the benchmarks of ``kvboost bench``
__main__.py     the command line
faults/         faults that an engine must survive, injected for real
larger/         a model that is larger than the GPU's memory
shapes.py, random_int4.py    models with random weights
vllm_runs.py, vllm_connector.py        runs inside vLLM, in its own environment

Every other module is a benchmark. They share ``kvboost.bench``: the kit, texts and other engines.
"""
