"""Engines to measure side by side, each in a process and an environment of its own.

base.py            where they are, what all are told; setting.py: a model's folder and vocabulary
engines.py         engines behind a pipe, by name; workers/: their programs
worker.py          one of them: started, asked, timed; crew.py: all of a run
systems.py         servers, by name
process.py         start a server, wait until it is ready, stop for sure
kvboost_server.py  vllm_cpu.py  llamacpp.py
"""
