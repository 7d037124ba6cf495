"""Servers to measure side by side, each in a process and an environment of its own.

systems.py         their names
base.py            what a server is to us
process.py         start, wait until ready, stop for sure
kvboost_server.py  vllm_cpu.py  llamacpp.py
"""
