"""The common part of the bridges to Spark and to Ray Data: whole stretches of a topic in and out, as Arrow.

``places.py`` says where a read begins and ends, ``ranges.py`` what to read,
``lookup.py`` asks the cluster for it, ``scan.py`` reads one range as Arrow.
``rows.py`` turns columns into batches for partitions, ``append.py`` writes them
exactly once, ``staging.py`` keeps what tasks wrote until their job decides.
``publish.py`` decides and carries it out: ``ledger.py`` knows which batches are
decided, ``journal.py`` has the decisions, ``copies.py`` makes records of what
they tell of. ``job.py`` is all of it for one job: its tasks and its driver.
"""
