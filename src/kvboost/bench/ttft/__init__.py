"""Time to first token.

patterns.py  what people send: stock, ours without and with reuse, the floor; one decode step;
             from short to long prompts, and where reuse begins to pay
chat.py      a conversation, turn by turn
peers.py     other engines, cold and warm, each in a process of its own
run.py       settings and run; report.py: tables, goals and the picture
"""
