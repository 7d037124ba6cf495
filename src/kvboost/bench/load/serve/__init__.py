"""Servers under load.

users.py    what users send; clients.py: sends it over HTTP and measures
stats.py    latencies, rates and goals; report.py: tables and the picture; run.py: the benchmark
"""
