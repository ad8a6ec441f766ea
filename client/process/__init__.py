"""The read-process-write loop: every record of a topic goes through a function once, and its results into another.

``loop.py`` is one worker, ``calls.py`` its calls of the function, ``state.py`` what that remembers by key,
``results.py`` what it may return, ``dead_letters.py`` what becomes of a record that was given up, ``handle.py`` what
``rq.process`` gives back.
``actor.py`` is a worker on another node.
"""
