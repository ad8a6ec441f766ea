"""The read-process-write loop: every record of a topic goes through a function once, and its results into another.

``loop.py`` is one worker, ``state.py`` what a function remembers by key,
``results.py`` what it may return, ``handle.py`` what ``rq.process`` gives back.
``actor.py`` is a worker on another node.
"""
