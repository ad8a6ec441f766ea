"""Work queues: the part of a partition's state that says what becomes of its records, if they are jobs.

``queue`` is the machine, and its text the theory; ``states`` says how a single
job goes from one state to the next. ``rows``, ``leases``, ``frontier``, ``index`` and
``facts`` own what is kept, ``commands`` the entries that change it, ``dump`` its
part of a checkpoint. ``reading`` finds jobs in a snapshot, ``moving`` what the
leader appends again so that the log can be trimmed.
"""
