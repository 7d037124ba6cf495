"""KVBoost inside vLLM: a KV connector that reuses exact and moved text.

``connector.py`` is what vLLM loads. In vLLM's scheduler process it asks the ``planner``; in its
worker processes it drives the ``worker``. They speak in ``messages``. This is the only package that
imports vLLM, and ``planner``, ``branches``, ``pages`` and ``environment`` do without it.
"""
