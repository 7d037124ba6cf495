"""Requests from the queue to the answer: schedule, plan, assemble, repair, decode, admit."""
