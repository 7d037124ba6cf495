"""Time to first token.

patterns.py  what people send: stock, ours without and with reuse, the floor; one decode step
lengths.py   from short to long prompts, and where reuse begins to pay
chat.py      a conversation, turn by turn
peers.py     other people's engines, cold and warm, behind the pipe of bench/peers
clock.py     our own clock against one outside
goals.py     what we want to reach
run.py       a whole run; report.py: on a terminal; plot.py: as a picture
"""
