"""Known text that stands somewhere else: what every engine makes of it.

prompts.py  the same documents at the front, in the middle, twice, in another order, behind a header
measure.py  all engines, behind the pipe, in turns
run.py      a whole run; report.py: on a terminal; plot.py: as a picture
"""
