"""One engine over several ranks: rank 0 plans, samples and keeps the catalogue; the others follow.

Every rank holds its KV heads of all rows: of running requests and of chunks in memory. Rank 0 tells
the others which methods to call, in order (``follower.py``); a chunk or a buffer has a number that
all ranks know it by. What rank 0 lets go, the others release.
"""
