"""Servers under load.

users.py    what users send; clients.py: sends it over HTTP and measures, by connection.py;
            processes.py: runs the clients in several processes
costs.py    processor time and the card's; stats.py: latencies, rates and goals
report.py   tables and the picture; run.py: the benchmark
"""
