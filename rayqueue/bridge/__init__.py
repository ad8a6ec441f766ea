"""The common part of the bridges to Spark and to Ray Data: whole stretches of a topic in and out, as Arrow.

``places.py`` says where a read begins and ends, ``ranges.py`` what to read,
``lookup.py`` asks the cluster for it, ``scan.py`` reads one range as Arrow.
``rows.py`` turns columns into batches for partitions, ``append.py`` sends them,
``task.py`` does so in a transaction for each attempt of a task, and ``publish.py``
lets those that count be seen, together. ``job.py`` is all of it for one job: its
tasks and its driver.
"""
