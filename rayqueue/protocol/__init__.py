"""The protocol between clients and replicas. No sockets, no clocks.

``hello.py`` is how a connection begins, ``frames.py`` how bytes are cut into
messages, ``data.py`` what travels in bulk (batches, in a fixed binary form),
``calls.py`` everything else (small, typed, msgpack), ``failures.py`` how an
error crosses the wire and is the same error on the other side.
"""
