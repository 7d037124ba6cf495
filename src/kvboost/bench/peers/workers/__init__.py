"""Programs of engines behind a pipe.

pipe.py runs them all and speaks the protocol; each other file has a class ``Engine``:

    Engine(given)                      loads; ``version`` and ``weights`` say what
    engine.generate(request, first)    calls ``first()`` at the first token; returns what it counted

``given`` and ``request`` are described in pipe.py. Other people's engines have theirs beside their
lists of packages in scripts/peers, and make peers puts both into an environment of their own.
"""
