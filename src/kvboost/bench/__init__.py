"""Benchmarks that users run: ``kvboost bench`` and ``kvboost quality``.

benchmarks.py  the list of them: the command line and the docs read it
kit/           what they share: settings, reports, timing, tables, figures, records
texts/         prompts and questions, made from text that every Python has
peers/         other engines, each in an environment of its own
ttft/  quality/  serve/  agent/    the benchmarks themselves

Those for people who work on KVBoost are in ``benchmarks/`` at the root of the repository.
"""
