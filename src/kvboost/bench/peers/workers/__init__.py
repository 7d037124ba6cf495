"""Programs that run in other people's environments, one per engine, and know nothing of ours.

pipe.py runs them all and speaks the protocol; each other file has a class ``Engine``:

    Engine(given)                      loads; ``version`` and ``weights`` say what
    engine.generate(request, first)    calls ``first()`` at the first token; gives what it counted

``given`` and ``request`` are described in pipe.py.
"""
