"""The gateway: REST and gRPC for callers that are not in the Ray cluster.

Four things that know little of each other:

- ``rest`` and ``rpc`` are the listeners: they read requests, call operations,
  and write answers. Another protocol would be a third one beside them.
- ``principals``, ``keys``: who a caller is and what he may do.
- ``limits``: how much of it.
- ``operations``: what can be done, in terms of the public client. No protocol.

Loaded only by who asks for it: it needs ``pip install 'rayqueue[gateway]'``.
"""
