"""Engines to measure side by side, each in a process and an environment of its own.

environments.py  where make peers puts them, and why one is not there
setting.py       what every engine of a run is told; the model's tokenizer
engines.py       engines by name; workers/: their programs, which speak over a pipe
worker.py        one engine: started, asked, timed; contenders.py: all engines of a run
servers.py       HTTP servers by name; process.py: starts and stops one; cpu.py: who used the CPU
"""
