"""An agent's turns.

settings.py  the options; run.py: the benchmark
made_up.py   a made-up session of a coding agent
replay.py    recorded sessions, sent to servers; traced.py: their prompts, and what a prefix cache
             would find in them; checks.py: first tokens and actions against a full prefill;
             replay_report.py: sums, tables and the picture
"""
