"""Benchmarks: the commands of ``kvboost bench``.

benchmarks.py  the list of them all: the command line, ``bench all`` and the docs read it
run_all.py     the main ones, each in a process of its own
kit/           what they share: settings, reports, timing, tables, figures, records, history
texts/         prompts and questions, made from text that every Python has
peers/         other engines, each in an environment of its own
speed/  quality/  load/  cache/    the benchmarks themselves
"""
