"""Known text at other places: what every engine makes of it.

prompts.py  the same documents at the front, in the middle, twice, reordered, after a header
run.py      settings, measurement, tables, goal and picture
"""
